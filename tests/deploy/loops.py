"""Engine loops joined in this process: everything of a worker but its processes."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.admission import PoolOptions
from kvferry.cache.errors import KVError
from kvferry.cache.layout import build_layout, build_static_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import ModelSpec
from kvferry.cache.static_manager import StaticKVCacheManager
from kvferry.deploy.engine_loop import EngineLoop
from kvferry.deploy.loop_settings import LoopSettings
from kvferry.deploy.requests import Request
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.synthetic import SyntheticEngine
from kvferry.transfer.inference import (
    DecodeCall,
    GenerateEvent,
    GenerateSummary,
    PrefillReply,
    SamplingParams,
    TokenChunk,
)
from kvferry.transfer.transceiver import Transceiver, TransceiverSettings
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.types import Role, TransferKey, WorkerId
from tests.cache.specs import spec
from tests.helpers import wait_until
from tests.transfer.pairs import End, deliver

WAIT_SECONDS = 10.0
_numbers = itertools.count()


class GatedEngine(Engine):
    """Another engine that computes only while its gate is open, so that a test can stop a loop inside a pass."""

    name = "gated"

    def __init__(self, engine: Engine) -> None:
        self.spec = engine.spec
        self.model_digest = engine.model_digest
        self.tokenizer = engine.tokenizer
        self.vocab_size = engine.vocab_size
        self.max_seq_len_tokens = engine.max_seq_len_tokens
        self.gate = threading.Event()
        self.gate.set()
        self.num_forward = 0
        self.at_gate = False
        self.computed: list[str] = []
        self._engine = engine

    def bind(self, manager: CacheManager) -> None:
        self._engine.bind(manager)

    def forward(self, sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        self.num_forward += 1
        self.computed.append(sequence.request_id)
        self.at_gate = True
        assert self.gate.wait(WAIT_SECONDS), "a test left the gate closed"
        self.at_gate = False
        return self._engine.forward(sequence, token_ids)


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
    def logprobs(self) -> list[float]:
        return [value for event in self.events if isinstance(event, TokenChunk) for value in event.logprobs]

    @property
    def reply(self) -> PrefillReply:
        return next(event for event in self.events if isinstance(event, PrefillReply))

    @property
    def summary(self) -> GenerateSummary:
        return next(event for event in self.events if isinstance(event, GenerateSummary))


def counting_prompt(num_tokens: int) -> tuple[int, ...]:
    """The prompt of requests that say only how long it is: each is a prefix of all longer ones."""
    return tuple(3 + index % 200 for index in range(num_tokens))


@dataclass
class Node:
    """One worker without its process."""

    end: End
    engine: GatedEngine
    loop: EngineLoop
    failed: threading.Event = field(default_factory=threading.Event)
    conditions: list[str] = field(default_factory=list)

    @property
    def manager(self) -> KVCacheManager:
        manager = self.end.manager
        assert isinstance(manager, KVCacheManager)
        return manager

    def request(
        self,
        prompt: int | Sequence[int],
        new_tokens: int = 4,
        *,
        hand_over: bool = False,
        seconds: float = 60.0,
        salt: str = "",
        key: TransferKey | None = None,
    ) -> Request:
        """A request for some tokens, or for that many of `counting_prompt`; with a key it is to be handed over."""
        now = time.monotonic()
        return Request(
            request_id=f"r{next(_numbers)}",
            prompt=counting_prompt(prompt) if isinstance(prompt, int) else tuple(prompt),
            sampling=SamplingParams(max_new_tokens=new_tokens, ignore_eos=True),
            sink=Sink(),
            arrived_at=now,
            deadline=now + seconds,
            hand_over=hand_over or key is not None,
            offer_key=key,
            cache_salt=salt,
        )

    def submit(self, request: Request) -> Sink:
        assert isinstance(request.sink, Sink)
        self.loop.submit(request)
        return request.sink

    def fetch(self, source: Request, reply: PrefillReply, seconds: float = 60.0) -> Request:
        """The decode request for a prompt that another node offered."""
        return self._receiving(source, reply.key, reply.sender, seconds)

    def expect(self, source: Request, sender: WorkerId, seconds: float = 60.0) -> Request:
        """The decode request for a prompt that another node will offer under the key it was given."""
        assert source.offer_key is not None
        return self._receiving(source, source.offer_key, sender, seconds, early=True)

    def _receiving(
        self, source: Request, key: TransferKey, sender: WorkerId, seconds: float, *, early: bool = False
    ) -> Request:
        now, salt = time.monotonic(), source.cache_salt
        call = DecodeCall(source.request_id, key, sender, source.prompt, source.sampling, seconds, salt, early)
        return Request(
            source.request_id, source.prompt, source.sampling, Sink(), now, now + seconds, decode=call, cache_salt=salt
        )

    def is_idle(self) -> bool:
        """Nobody uses any page and no request is known, seen from between two turns."""

        def look() -> bool:
            self.manager.check_integrity()
            idle = self.loop.num_waiting + self.loop.num_running + self.end.transceiver.num_sending == 0
            return idle and all(u.held == 0 and u.reserved == 0 for u in self.manager.usage())

        return self.loop.call(look).result(WAIT_SECONDS)


def new_key() -> TransferKey:
    """A key of an attempt that no test has used."""
    return TransferKey(f"{next(_numbers):032x}", 1)


def hand_over(prefill: Node, decode: Node, request: Request) -> Sink:
    """Prefill on one node, decode on the other, to the end."""
    reply = prefill.submit(request).wait().reply
    return decode.submit(decode.fetch(request, reply)).wait()


def synthetic_engine() -> Engine:
    """Self-checking bytes: two layers with a window of 8 tokens and two of full attention."""
    return SyntheticEngine(spec([8, None, 8, None]))


def make_manager(
    model: ModelSpec, version: str, num_slots: int | Sequence[int], tokens_per_block: int, options: PoolOptions
) -> KVCacheManager:
    """A manager of either kind; `num_slots` for every pool group, or for each its own."""
    kinds = {"V2": (build_layout, KVCacheManager), "V1": (build_static_layout, StaticKVCacheManager)}
    build, manager_class = kinds[version]
    layout = build(model, tokens_per_block=tokens_per_block)
    slots = [num_slots] * len(layout.pool_groups) if isinstance(num_slots, int) else num_slots
    return manager_class(layout, slots, options=options)


@contextlib.contextmanager
def nodes(
    num_slots: int | Sequence[int] = 64,
    *,
    engine: Callable[[], Engine] = synthetic_engine,
    manager: str = "V2",
    tokens_per_block: int = 4,
    options: PoolOptions = PoolOptions(),  # noqa: B008 - immutable
    hold_seconds: float = 30.0,
    stall_seconds: float = 10.0,
    lease_seconds: float = 10.0,
    **settings: Any,
) -> Iterator[tuple[Node, Node]]:
    """A prefill and a decode node, paired. At the end both are idle unless their loop failed."""
    bounds = {"max_waiting": 8, "max_running": 4, "max_held": 4, "max_seq_len_tokens": 400, "prefill_chunk_tokens": 16}
    loop_settings = LoopSettings(
        **{**bounds, **settings},
        transfer_timeout_seconds=30.0,
        hold_seconds=hold_seconds,
        stall_seconds=stall_seconds,
    )
    made = []
    for name in ("p", "d"):
        gated = GatedEngine(engine())
        pools = make_manager(gated.spec, manager, num_slots, tokens_per_block, options)
        made.append(_node(name, gated, pools, loop_settings))
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
            settings=TransceiverSettings(lease_seconds=lease_seconds),
        )
    for node, other in zip(made, reversed(made), strict=True):
        node.end.transceiver.pair(other.end.transceiver.info).result(WAIT_SECONDS)
        note = lambda node=node: node.conditions.append(node.loop.condition)  # noqa: E731
        node.loop.start(node.end.transceiver, node.failed.set, note)
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


def _node(name: str, engine: GatedEngine, manager: KVCacheManager, settings: LoopSettings) -> Node:
    engine.bind(manager)
    worker = WorkerId(name, 100 + next(_numbers))
    return Node(End(worker, manager), engine, EngineLoop(worker, engine, manager, settings))
