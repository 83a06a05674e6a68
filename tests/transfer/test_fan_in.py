"""One grant, several senders: its pages come back when the sessions with all of them are quiet."""

import contextlib
from collections.abc import Iterator

from kvferry.cache.errors import PeerLost, TransferError
from kvferry.transfer.transceiver import Transceiver
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.types import Cancel, Direction, Role, TransferKey, WorkerId
from tests.helpers import wait_until
from tests.transfer.bending import FailsLater, lose, sweep, total_quarantined
from tests.transfer.pairs import (
    PROMPT_TOKENS,
    WAIT_SECONDS,
    End,
    Pair,
    aux_of,
    deliver,
    pair,
    prompt_of,
    v2_manager,
)
from tests.transfer.tables import PLAIN

OTHER = WorkerId("q", 200)


@contextlib.contextmanager
def second_sender(running: Pair) -> Iterator[End]:
    """Another worker that prefills for the same receiver."""
    other, receiver = End(OTHER, v2_manager(PLAIN, 64)), running.receiver
    other.transceiver = Transceiver(
        OTHER,
        Role.PREFILL,
        other.manager,
        LoopbackTransport(f"q-{running.sender.transceiver.info.agent_name}"),
        model_digest="d",
        send=lambda _, message: deliver(other, receiver, message),
        hang_up=lambda worker, reason: other.hung_up.append((worker, reason)),
        clock=running.clock,
    )
    to_first = receiver.transceiver._send
    route = lambda worker, message: deliver(receiver, other, message) if worker == OTHER else to_first(worker, message)  # noqa: E731
    receiver.transceiver._send = receiver.transceiver._receiver._send = route
    other.transceiver.pair(receiver.transceiver.info).result(WAIT_SECONDS)
    receiver.transceiver.pair(other.transceiver.info).result(WAIT_SECONDS)
    try:
        yield other
    finally:
        assert other.transceiver.close(WAIT_SECONDS)


def offer(end: End, key: TransferKey) -> None:
    """Both computed the same prompt."""
    pages = end.fill(PROMPT_TOKENS).pages(PROMPT_TOKENS)
    end.transceiver.offer(key, pages, prompt_of(PROMPT_TOKENS), aux_of(PROMPT_TOKENS), 60.0)


def request(running: Pair, key: TransferKey) -> None:
    room = running.receiver.room(PROMPT_TOKENS)
    senders = (running.sender.worker, OTHER)
    running.receiver.transceiver.request(
        key, senders, room.pages(PROMPT_TOKENS), prompt_of(PROMPT_TOKENS), 60.0, early=True
    )
    room.close()


def test_attempt_is_done_when_every_sender_is() -> None:
    with pair() as running, second_sender(running) as other:
        key = running.key()
        request(running, key)
        offer(running.sender, key)
        assert running.wait_outcome(running.sender).error is None
        assert running.receiver.poll() == []
        offer(other, key)
        outcome = running.wait_outcome(running.receiver)
        assert (outcome.error, outcome.aux) == (None, aux_of(PROMPT_TOKENS))
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "both are quiet")


def test_failure_of_one_sender_ends_the_attempt_and_its_pages_wait_for_the_other() -> None:
    with pair() as running, second_sender(running) as other:
        key = running.key()
        request(running, key)
        running.sender.transceiver.cancel(key, "cannot compute it")
        assert isinstance(running.wait_outcome(running.receiver).error, TransferError)
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the other one said that it writes nothing")
        offer(other, key)
        assert "cannot compute it" in str(running.wait_outcome(other).error)


def test_lost_sender_keeps_the_pages_in_doubt_although_the_other_one_is_done() -> None:
    with pair() as running, second_sender(running):
        key = running.key()
        request(running, key)
        offer(running.sender, key)
        assert running.wait_outcome(running.sender).error is None
        running.receiver.bend = lose(Cancel)
        running.receiver.transceiver.on_channel_lost(OTHER, "stream broke")
        assert isinstance(running.wait_outcome(running.receiver).error, PeerLost)
        wait_until(lambda: total_quarantined(running) > 0, WAIT_SECONDS, "one of two is in doubt")
        assert len(running.receiver.poll()) == 1
        running.receiver.bend = lambda message: message
        running.receiver.transceiver.on_channel_up(OTHER)
        wait_until(running.receiver.is_empty, WAIT_SECONDS, "the other one says that it wrote nothing")


def test_failed_read_from_one_sender_stops_the_reads_from_the_other() -> None:
    FailsLater.failing = False
    with pair(FailsLater) as running, second_sender(running) as other:
        key = running.key()
        offer(running.sender, key)
        offer(other, key)
        room = running.receiver.room(PROMPT_TOKENS)
        running.receiver.transceiver.request(
            key,
            (running.sender.worker, OTHER),
            room.pages(PROMPT_TOKENS),
            prompt_of(PROMPT_TOKENS),
            60.0,
            direction=Direction.PULL,
        )
        room.close()
        jobs = running.receiver.transceiver._driver._poster._jobs
        wait_until(lambda: sum(bool(job.under_way) for job in jobs()) == 2, WAIT_SECONDS, "both reads are under way")
        FailsLater.failing = True
        assert "read_failed" in str(running.wait_outcome(running.receiver).error)
        sweep(running)
        assert running.receiver.transceiver.failure is None


def test_sender_that_is_done_need_not_renew_while_another_one_moves() -> None:
    with pair(lease_seconds=9.0) as running, second_sender(running) as other:
        key = running.key()
        request(running, key)
        offer(running.sender, key)
        assert running.wait_outcome(running.sender).error is None
        for _ in range(10):
            running.clock.now += 3.0
            sweep(running)
            other.transceiver.lanes().result(WAIT_SECONDS)
            other.transceiver.lanes().result(WAIT_SECONDS)
        assert running.receiver.poll() == []
        offer(other, key)
        assert running.wait_outcome(running.receiver).error is None
