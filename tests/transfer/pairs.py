"""Two transceivers in this process, joined by a control plane that a test can bend."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.cache.layout import build_layout, build_static_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import ModelSpec
from kvferry.cache.static_manager import StaticKVCacheManager
from kvferry.transfer.outcomes import TransferOutcome
from kvferry.transfer.transceiver import Transceiver, TransceiverSettings
from kvferry.transfer.transport.base import Transport
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.types import (
    AuxRecord,
    Cancel,
    Direction,
    Grant,
    Message,
    Permit,
    PromptId,
    Renewal,
    Role,
    TransferKey,
    TransferResult,
    Usage,
    WorkerId,
)
from tests.helpers import wait_until
from tests.transfer.tables import PLAIN

Bend = Callable[[Message], Message | None]
"""What the control plane makes of a message; None loses it after it was accepted."""


def prompt_of(num_tokens: int) -> PromptId:
    return PromptId.of(range(num_tokens))


def aux_of(prompt_tokens: int) -> AuxRecord:
    return AuxRecord((42,), (-0.5,), Usage(prompt_tokens))


PROMPT_TOKENS = 30
WAIT_SECONDS = 10.0

_numbers = itertools.count()


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class End:
    """One worker of the pair."""

    worker: WorkerId
    manager: CacheManager
    outcomes: list[TransferOutcome] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    bend: Bend = lambda message: message
    connected: bool = True
    hung_up: list[tuple[WorkerId, str]] = field(default_factory=list)
    transceiver: Transceiver = None  # type: ignore[assignment]

    def poll(self) -> list[TransferOutcome]:
        self.outcomes += self.transceiver.poll()
        return self.outcomes

    def free(self) -> list[int]:
        self.poll()
        self.manager.check_integrity()
        return [usage.free for usage in self.manager.usage()]

    def is_empty(self) -> bool:
        return self.free() == [usage.num_slots for usage in self.manager.usage()]

    def fill(self, tokens: int, value: int = 0) -> SequenceCache:
        """A computed prompt: its pages hold bytes that depend on slot and value."""
        sequence = self.sequence()
        sequence.resize(capacity=tokens)
        for pool in self.manager.storage.pools:
            pool.copy_((torch.arange(pool.numel()) * 31 + value * 7 + 1).to(torch.uint8))
        sequence.resize(history=tokens)
        return sequence

    def room(self, tokens: int) -> SequenceCache:
        """Pages for a prompt that is to be received."""
        sequence = self.sequence()
        sequence.resize(capacity=tokens, history=tokens)
        return sequence

    def sequence(self) -> SequenceCache:
        sequence = self.manager.create_sequence("r", tuple(24 for _ in self.manager.layout.pool_groups))
        sequence.resume()
        return sequence

    def page_bytes(self, sequence: SequenceCache) -> list[bytes]:
        """Content of every page, life cycle by life cycle, in block order; of one page, pool by pool."""
        content = []
        for group in self.manager.layout.life_cycles:
            indices = self.manager.storage.pool_indices(group.pool_group)
            pools = [
                self.manager.storage.pools[index].view(-1, size)
                for index, size in zip(indices, group.pool_bytes, strict=True)
            ]
            slots = [slot for slot in sequence.slots(group.id).tolist() if slot >= 0]
            content += [b"".join(pool[slot].numpy().tobytes() for pool in pools) for slot in slots]
        return content


@dataclass
class Pair:
    """`sender` prefills, `receiver` decodes."""

    sender: End
    receiver: End
    clock: FakeClock
    direction: Direction = Direction.PUSH

    def key(self) -> TransferKey:
        return TransferKey(f"{next(_numbers):032x}", 1)

    def offer(
        self,
        key: TransferKey,
        sequence: SequenceCache,
        tokens: int = PROMPT_TOKENS,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        pages = sequence.pages(tokens)
        self.sender.transceiver.offer(key, pages, prompt_of(tokens), aux_of(tokens), timeout, **options)

    def request(
        self,
        key: TransferKey,
        sequence: SequenceCache,
        tokens: int = PROMPT_TOKENS,
        timeout: float = 60.0,
        skip_blocks: int = 0,
        **options: Any,
    ) -> None:
        pages = sequence.pages(tokens, skip_blocks=skip_blocks)
        options.setdefault("direction", self.direction)
        senders = (self.sender.worker,)
        self.receiver.transceiver.request(key, senders, pages, prompt_of(tokens), timeout, **options)

    def wait_outcome(self, end: End, count: int = 1) -> TransferOutcome:
        wait_until(lambda: len(end.poll()) >= count, WAIT_SECONDS, f"{end.worker} hears {count} outcomes")
        return end.outcomes[count - 1]


def v2_manager(model: ModelSpec, num_slots: int) -> KVCacheManager:
    """Pools in this machine's memory, 4 tokens per block."""
    layout = build_layout(model, tokens_per_block=4)
    return KVCacheManager(layout, [num_slots] * len(layout.pool_groups))


def v1_manager(model: ModelSpec, num_slots: int) -> KVCacheManager:
    """As `v2_manager`, with static pools."""
    layout = build_static_layout(model, tokens_per_block=4)
    return StaticKVCacheManager(layout, [num_slots] * len(layout.pool_groups))


MakeManager = Callable[[ModelSpec, int], CacheManager]


def deliver(source: End, target: End, message: Message) -> bool:
    """Hand a message over as the network would."""
    if not source.connected:
        return False
    source.sent.append(message)
    bent = source.bend(message)
    match bent:
        case Grant():
            target.transceiver.on_grant(source.worker, bent)
        case Permit():
            target.transceiver.on_permit(source.worker, bent)
        case TransferResult():
            target.transceiver.on_result(source.worker, bent)
        case Cancel():
            target.transceiver.on_cancel(source.worker, bent)
        case Renewal():
            target.transceiver.on_renewal(source.worker, bent)
    return True


@contextlib.contextmanager
def pair(
    transports: Callable[[str], Transport] = LoopbackTransport,
    num_slots: int = 64,
    model: ModelSpec = PLAIN,
    managers: MakeManager = v2_manager,
    direction: Direction = Direction.PUSH,
    **settings: Any,
) -> Iterator[Pair]:
    """Two paired transceivers over real transports; at the end both are closed and their books add up."""
    clock = FakeClock()
    ends = [End(WorkerId(name, 100 + index), managers(model, num_slots)) for index, name in enumerate(("p", "d"))]
    for end, other, role in zip(ends, reversed(ends), (Role.PREFILL, Role.DECODE), strict=True):
        end.transceiver = Transceiver(
            end.worker,
            role,
            end.manager,
            transports(f"{end.worker.name}-{next(_numbers)}"),
            model_digest="d",
            send=lambda to, message, end=end, other=other: (
                to.name == other.worker.name and deliver(end, other, message)
            ),
            hang_up=lambda worker, reason, end=end: end.hung_up.append((worker, reason)),
            settings=TransceiverSettings(**settings),
            clock=clock,
        )
    for end, other in zip(ends, reversed(ends), strict=True):
        end.transceiver.pair(other.transceiver.info).result(WAIT_SECONDS)
    try:
        yield Pair(*ends, clock, direction)
        for end in ends:
            end.free()
    finally:
        closed = [end.transceiver.close(WAIT_SECONDS) for end in ends]
    assert all(closed)
