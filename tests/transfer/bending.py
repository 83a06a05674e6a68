"""Transports that misbehave, and short cuts for tests that bend transfers."""

from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.transport.base import Post, PostState
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.types import TransferKey, TransferResult
from tests.transfer.pairs import PROMPT_TOKENS, WAIT_SECONDS, Bend, End, Pair


def lose(kind: type) -> Bend:
    """A control plane that loses every message of a kind."""
    return lambda message: None if isinstance(message, kind) else message


def total_quarantined(running: Pair) -> int:
    running.receiver.poll()
    return sum(running.receiver.transceiver.quarantined_slots())


def paired_names(running: Pair, end: End) -> set[str]:
    return {worker.name for worker in end.transceiver.lanes().result(WAIT_SECONDS)}


def sweep(running: Pair) -> None:
    """Let both reactors do what is due by now: a turn begins after each of these answers."""
    for end in (running.sender, running.receiver):
        for _ in range(2):
            end.transceiver.lanes().result(WAIT_SECONDS)


def start_transfer(running: Pair, **limits: float) -> tuple[TransferKey, SequenceCache, SequenceCache]:
    source, target, key = running.sender.fill(PROMPT_TOKENS), running.receiver.room(PROMPT_TOKENS), running.key()
    running.offer(key, source)
    running.request(key, target, **limits)
    return key, source, target


def results(running: Pair) -> list[TransferResult]:
    return [message for message in running.sender.sent if isinstance(message, TransferResult)]


class Stuck(LoopbackTransport):
    """Posts fail, and the handle is given up only when the test says so."""

    gives_up = False

    def poll(self, post: Post) -> PostState:
        super().poll(post)
        return PostState.FAILED

    def release(self, post: Post) -> bool:
        return type(self).gives_up and super().release(post)


class LetsGo(LoopbackTransport):
    """Writes that fail after they were handed over: the source is let go, the bytes may still be on their way."""

    failing = True

    def poll(self, post: Post) -> PostState:
        state = super().poll(post)
        return PostState.FAILED if type(self).failing else state


class FailsLater(LoopbackTransport):
    """Posts are under way until the test says that they failed."""

    failing = False

    def poll(self, post: Post) -> PostState:
        super().poll(post)
        return PostState.FAILED if type(self).failing else PostState.IN_PROGRESS


class Slow(LoopbackTransport):
    """Writes are under way until the test says that they are over, and cannot be taken back before."""

    over = False

    def poll(self, post: Post) -> PostState:
        state = super().poll(post)
        return state if type(self).over else PostState.IN_PROGRESS

    def release(self, post: Post) -> bool:
        return type(self).over and super().release(post)
