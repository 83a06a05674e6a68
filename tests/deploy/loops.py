"""Engine loops over self-checking bytes, joined in this process: everything of a worker but its processes."""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.errors import KVError
from kvferry.cache.layout import build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.deploy.engine_loop import EngineLoop, LoopSettings
from kvferry.deploy.requests import Request
from kvferry.transfer.engines.synthetic import SyntheticEngine
from kvferry.transfer.inference import (
    DecodeCall,
    GenerateEvent,
    GenerateSummary,
    PrefillReply,
    SamplingParams,
    TokenChunk,
)
from kvferry.transfer.transceiver import Transceiver
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.types import Role, WorkerId
from tests.cache.specs import spec
from tests.helpers import wait_until
from tests.transfer.pairs import End, deliver

WAIT_SECONDS = 10.0
_numbers = itertools.count()


class GatedEngine(SyntheticEngine):
    """Computes only while its gate is open, so that a test can stop a loop inside a forward pass."""

    def __init__(self) -> None:
        super().__init__(spec([8, None, 8, None]))
        self.gate = threading.Event()
        self.gate.set()
        self.num_forward = 0

    def forward(self, sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        self.num_forward += 1
        assert self.gate.wait(WAIT_SECONDS), "a test left the gate closed"
        return super().forward(sequence, token_ids)


@dataclass
class Sink:
    """Keeps what a request produced."""

    events: list[GenerateEvent | PrefillReply] = field(default_factory=list)
    error: KVError | None = None
    num_finished: int = 0

    def put(self, event: GenerateEvent | PrefillReply) -> None:
        assert not self.num_finished, "nothing comes after the end"
        self.events.append(event)

    def finish(self, error: KVError | None) -> None:
        self.error = error
        self.num_finished += 1

    def wait(self) -> "Sink":
        wait_until(lambda: self.num_finished, WAIT_SECONDS, "the request ends")
        assert self.num_finished == 1
        return self

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, TokenChunk) for token in event.token_ids]

    @property
    def reply(self) -> PrefillReply:
        return next(event for event in self.events if isinstance(event, PrefillReply))

    @property
    def summary(self) -> GenerateSummary:
        return next(event for event in self.events if isinstance(event, GenerateSummary))


@dataclass
class Node:
    """One worker without its process."""

    end: End
    engine: GatedEngine
    loop: EngineLoop
    failed: threading.Event = field(default_factory=threading.Event)

    def request(
        self, prompt_tokens: int, new_tokens: int = 4, *, hand_over: bool = False, seconds: float = 60.0
    ) -> Request:
        now = time.monotonic()
        return Request(
            request_id=f"r{next(_numbers)}",
            prompt=tuple(3 + index % 200 for index in range(prompt_tokens)),
            sampling=SamplingParams(max_new_tokens=new_tokens, ignore_eos=True),
            sink=Sink(),
            arrived_at=now,
            deadline=now + seconds,
            hand_over=hand_over,
        )

    def submit(self, request: Request) -> Sink:
        assert isinstance(request.sink, Sink)
        self.loop.submit(request)
        return request.sink

    def fetch(self, source: Request, reply: PrefillReply, seconds: float = 60.0) -> Request:
        """The decode request for a prompt that another node offered."""
        now = time.monotonic()
        call = DecodeCall(source.request_id, reply.key, reply.sender, reply.prompt_token_ids, source.sampling, seconds)
        return Request(source.request_id, source.prompt, source.sampling, Sink(), now, now + seconds, decode=call)

    def is_idle(self) -> bool:
        """Every page is free and no request is known, seen from between two turns."""

        def look() -> bool:
            manager = self.end.manager
            manager.check_integrity()
            idle = self.loop.num_waiting + self.loop.num_running + self.end.transceiver.num_sending == 0
            return idle and all(u.free == u.num_slots and u.reserved == 0 for u in manager.usage())

        return self.loop.call(look).result(WAIT_SECONDS)


@contextlib.contextmanager
def nodes(num_slots: int = 64, *, hold_seconds: float = 30.0, **settings: int) -> Iterator[tuple[Node, Node]]:
    """A prefill and a decode node, paired. At the end both are idle unless their loop failed."""
    bounds = {"max_waiting": 8, "max_running": 4, "max_held": 4, "max_seq_len_tokens": 400, "prefill_chunk_tokens": 16}
    loop_settings = LoopSettings(**{**bounds, **settings}, transfer_timeout_seconds=30.0, hold_seconds=hold_seconds)
    made = [_node(name, num_slots, loop_settings) for name in ("p", "d")]
    for node, other, role in zip(made, reversed(made), (Role.BOTH, Role.DECODE), strict=True):
        node.end.transceiver = Transceiver(
            node.end.worker,
            role,
            node.end.manager,
            LoopbackTransport(f"{node.end.worker.name}-{next(_numbers)}"),
            model_digest="d",
            send=lambda _, message, end=node.end, other=other.end: deliver(end, other, message),
            hang_up=lambda worker, reason, end=node.end: end.hung_up.append((worker, reason)),
            wake=node.loop.wake,
        )
    for node, other in zip(made, reversed(made), strict=True):
        node.end.transceiver.pair(other.end.transceiver.info).result(WAIT_SECONDS)
        node.loop.start(node.end.transceiver, node.failed.set)
    try:
        yield made[0], made[1]
        for node in made:
            if not node.failed.is_set():
                wait_until(node.is_idle, WAIT_SECONDS, f"{node.end.worker} is idle")
    finally:
        for node in made:
            node.engine.gate.set()
        stopped = [node.loop.stop(WAIT_SECONDS) and node.end.transceiver.close(WAIT_SECONDS) for node in made]
    assert all(stopped)


def _node(name: str, num_slots: int, settings: LoopSettings) -> Node:
    engine = GatedEngine()
    layout = build_layout(engine.spec, tokens_per_block=4)
    manager = KVCacheManager(layout, [num_slots] * len(layout.pool_groups))
    engine.bind(manager)
    worker = WorkerId(name, 100 + next(_numbers))
    return Node(End(worker, manager), engine, EngineLoop(worker, engine, manager, settings))
