"""A worker process: an engine over pools, a transceiver, and the control plane around them."""

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from kvferry.cache.errors import ConfigError, DeadlineExceeded, InvariantError, KVError, TransportError
from kvferry.cache.protocol import CacheManager
from kvferry.deploy.config import WorkerConfig
from kvferry.deploy.engine_loop import OK, EngineLoop
from kvferry.deploy.loop_settings import LoopSettings
from kvferry.deploy.pools import build_manager
from kvferry.deploy.process import EXIT_FAILED, EXIT_OK, write_endpoint
from kvferry.deploy.requests import Request
from kvferry.deploy.streams import EventStream, StreamEvent
from kvferry.transfer.control.background import background
from kvferry.transfer.control.directory_client import DirectoryClient
from kvferry.transfer.control.handlers import Snapshot
from kvferry.transfer.control.network import PeerNetwork
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.hf import HfEngine
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.synthetic import SyntheticEngine
from kvferry.transfer.inference import (
    DecodeCall,
    DirectoryEntry,
    GenerateCall,
    GenerateEvent,
    PeerStatus,
    PoolGroupStatus,
    PrefillReply,
    WorkerStatus,
)
from kvferry.transfer.transceiver import Transceiver, TransceiverSettings
from kvferry.transfer.transport import registry
from kvferry.transfer.transport.lanes import prepare_environment
from kvferry.transfer.types import RankInfo, Role, TransferKey, WorkerId

log = logging.getLogger(__name__)

JOIN_SECONDS = 20.0
LEAVE_SECONDS = 2.0
STOP_SECONDS = 5.0
ANSWERED_POLL_SECONDS = 0.02
STATUS_SECONDS = 5.0
TOKENIZE_SECONDS = 60.0
"""The caller's own deadline ends its call earlier."""


@dataclass(frozen=True)
class Parts:
    """What a worker is made of, in the order it is made."""

    worker: WorkerId
    engine: Engine
    manager: CacheManager
    loop: EngineLoop


def build_parts(config: WorkerConfig) -> Parts:
    """Load the model and make its pools and its engine loop. Takes seconds; touches no network."""
    torch.set_num_threads(config.num_threads)
    engine = _load_engine(config)
    limit = min(config.max_seq_len_tokens or engine.max_seq_len_tokens, engine.max_seq_len_tokens)
    manager = build_manager(config, engine.spec, limit)
    engine.bind(manager)
    worker = WorkerId(config.name, secrets.randbits(63))
    settings = LoopSettings(
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_seq_len_tokens=limit,
        max_waiting=config.max_waiting_requests,
        max_running=config.max_running_requests,
        max_held=config.transfer.max_held_transfers,
        transfer_timeout_seconds=config.transfer.timeout_seconds,
        hold_seconds=config.transfer.hold_seconds,
        stall_seconds=config.stall_seconds,
        direction=config.transfer.direction,
        max_receiving_bytes=config.transfer.max_receiving_bytes,
        max_held_bytes=config.transfer.max_held_bytes,
        quarantine_limit=config.transfer.quarantine_limit,
    )
    loop = EngineLoop(worker, engine, manager, settings)
    return Parts(worker, engine, manager, loop)


def _load_engine(config: WorkerConfig) -> Engine:
    model = load_model(config.model, device=config.device)
    return HfEngine(model) if config.engine == "hf" else SyntheticEngine(model.spec)


class Worker:
    """Answers the control plane for one set of parts.

    Concurrency: one asyncio loop.
    """

    def __init__(self, config: WorkerConfig, parts: Parts, ucx_log: Path | None) -> None:
        self.failed = asyncio.Event()
        self.failure: KVError | None = None
        self._asyncio = asyncio.get_running_loop()
        self._stopping = False
        self._config = config
        self._parts = parts
        self._worker = parts.worker
        agent_name = f"{self._worker.name}-{self._worker.incarnation:016x}"
        options = {"log_path": ucx_log} if config.transfer.transport == "nixl" else {}
        self._transceiver = Transceiver(
            self._worker,
            config.role,
            parts.manager,
            registry.create(config.transfer.transport, agent_name, **options),
            model_digest=parts.engine.model_digest,
            send=lambda worker, message: self._network.send(worker, message),
            hang_up=self._hang_up,
            wake=parts.loop.wake,
            settings=TransceiverSettings(
                config.transfer.slice_bytes,
                max_transfers=config.transfer.max_held_transfers + config.max_running_requests,
                lease_seconds=config.transfer.lease_seconds,
            ),
        )
        self._network = PeerNetwork(
            local=lambda: self._transceiver.info,
            pair=self._pair,
            sink=self._transceiver,
            status=self.status,
            on_paired=self._on_paired,
        )
        parts.loop.start(self._transceiver, self._fail, self._on_condition)
        self._server = ControlServer(config.listen, peer=self._network, transfer=self._network, inference=self)
        self._directory: DirectoryClient | None = None
        self._updates: set[asyncio.Task[None]] = set()

    # ---- life

    async def start(self) -> str:
        """Serve and join the directory. Returns HOST:PORT. Raises ConfigError, Unavailable or DeadlineExceeded."""
        await self._server.start()
        entry = DirectoryEntry(self._worker, self._config.role, self._server.address, self._config.model)
        self._directory = DirectoryClient(
            self._config.directory,
            on_snapshot=self._on_snapshot,
            entry=entry,
            lease_seconds=self._config.lease_seconds,
            on_replaced=self._on_replaced,
        )
        self._directory.start()
        await self._directory.wait_joined(JOIN_SECONDS)
        await self._show_health()
        return self._server.address

    async def stop(self) -> bool:
        """Leave, stop computing, tell peers about what is open, stop moving. False: some thread did not end in time."""
        self._stopping = True
        await self._show_health()
        if self._directory is not None:
            await self._directory.leave(LEAVE_SECONDS)
        loop_ended = await asyncio.to_thread(self._parts.loop.stop, STOP_SECONDS)
        await self._abandon()
        await self._network.close()
        await self._server.stop()
        return await asyncio.to_thread(self._transceiver.close, STOP_SECONDS) and loop_ended

    # ---- InferenceHandler

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        """Prefill and decode here, without moving anything. Only a worker with role both offers it."""
        if self._config.role is not Role.BOTH:
            raise ConfigError(f"{self._worker.name} has role {self._config.role.value}: only role both generates alone")
        if call.key is not None:
            raise ConfigError(f"transfer {call.key} is named, but nothing is moved: only Prefill takes a key")
        async with aclosing(self._run(await self._request(call, hand_over=False))) as events:
            async for event in events:
                assert not isinstance(event, PrefillReply)
                yield event

    async def prefill(self, call: GenerateCall) -> PrefillReply:
        if not self._config.role.prefills:
            raise ConfigError(f"{self._worker.name} has role {self._config.role.value}: it does not prefill")
        async with aclosing(self._run(await self._keyed_request(call))) as events:
            async for event in events:
                if isinstance(event, PrefillReply):
                    return event
        raise InvariantError(f"prefill of {call.request_id} ended without a reply")

    async def decode(self, call: DecodeCall) -> AsyncGenerator[GenerateEvent, None]:
        if not self._config.role.decodes:
            raise ConfigError(f"{self._worker.name} has role {self._config.role.value}: it does not decode")
        now = time.monotonic()
        request = Request(
            request_id=call.request_id,
            prompt=call.prompt_token_ids,
            sampling=call.sampling,
            sink=EventStream(),
            arrived_at=now,
            deadline=now + call.timeout_seconds,
            decode=call,
            cache_salt=call.cache_salt,
        )
        async with aclosing(self._run(request)) as events:
            async for event in events:
                assert not isinstance(event, PrefillReply)
                yield event

    async def cancel(self, key: TransferKey, reason: str) -> None:
        self._parts.loop.cancel(key, reason)

    async def tokenize(self, prompt: str, chat: bool) -> tuple[int, ...]:
        return await self._encode(prompt, chat, TOKENIZE_SECONDS)

    async def status(self) -> WorkerStatus:
        """The books of this worker between two turns of its loop."""
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                lanes = await asyncio.wrap_future(self._transceiver.lanes())
                return await asyncio.wrap_future(self._parts.loop.call(lambda: self._status(lanes)))
        except TimeoutError:
            text = f"the worker computes without a pause since {STATUS_SECONDS:g} s: ask again"
            raise DeadlineExceeded(text, peer=str(self._worker)) from None

    # ---- private

    async def _keyed_request(self, call: GenerateCall) -> Request:
        """A request to hand over. When its prompt cannot be turned into tokens, whoever waits for its key hears so."""
        try:
            return await self._request(call, hand_over=True)
        except (KVError, asyncio.CancelledError) as error:
            if call.key is not None:
                with suppress(KVError):
                    self._parts.loop.cancel(call.key, str(error) or "the caller went away")
            raise

    async def _request(self, call: GenerateCall, *, hand_over: bool) -> Request:
        now = time.monotonic()
        return Request(
            request_id=call.request_id,
            prompt=await self._tokens(call),
            sampling=call.sampling,
            sink=EventStream(self._take_back),
            arrived_at=now,
            deadline=now + call.timeout_seconds,
            hand_over=hand_over,
            offer_key=call.key,
            cache_salt=call.cache_salt,
        )

    def _take_back(self, event: StreamEvent) -> None:
        """A prompt was offered to a caller that is gone: nobody else knows its key."""
        if isinstance(event, PrefillReply):
            # A loop that takes no more commands ends, or is overloaded; then the offer's own timeout frees the pages.
            with suppress(KVError):
                self._parts.loop.cancel(event.key, "the caller went away before it got the key")

    async def _tokens(self, call: GenerateCall) -> tuple[int, ...]:
        if call.prompt_token_ids is not None:
            return call.prompt_token_ids
        return await self._encode(call.prompt or "", call.chat, call.timeout_seconds)

    async def _encode(self, prompt: str, chat: bool, timeout_seconds: float) -> tuple[int, ...]:
        """Tokens of a text, made on the engine's thread, whose tokenizer it is."""
        if not prompt:
            raise ConfigError("the prompt is empty: give at least one token")
        tokenizer = self._parts.engine.tokenizer
        made = self._parts.loop.call(lambda: tuple(tokenizer.encode(prompt, chat=chat)))
        try:
            async with asyncio.timeout(timeout_seconds):
                return await asyncio.wrap_future(made)
        except TimeoutError:
            raise DeadlineExceeded("the prompt's turn did not come in time", peer=str(self._worker)) from None

    async def _run(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        """Submit a request and pass on its events; when the reader goes away, the request is dropped."""
        assert isinstance(request.sink, EventStream)
        self._parts.loop.submit(request)
        try:
            async for event in request.sink.events():
                yield event
        finally:
            request.cancelled.set()
            self._parts.loop.wake()

    def _status(self, lanes: dict[WorkerId, tuple[Role, str]]) -> WorkerStatus:
        manager, quarantined = self._parts.manager, self._transceiver.quarantined_slots()
        groups = tuple(
            PoolGroupStatus(
                life_cycles=tuple(str(manager.layout.life_cycles[index].life_cycle) for index in group.life_cycles),
                slot_bytes=group.slot_bytes,
                num_slots=usage.num_slots,
                free=usage.free,
                cached=usage.cached,
                in_use=usage.held - doubtful,
                quarantined=doubtful,
                reserved=usage.reserved,
            )
            for group, usage, doubtful in zip(manager.layout.pool_groups, manager.usage(), quarantined, strict=True)
        )
        return WorkerStatus(
            worker=self._worker,
            role=self._config.role,
            model=self._config.model,
            manager=manager.version,
            transport=self._config.transfer.transport.upper(),
            runtime="PYTHON",
            pool_groups=groups,
            waiting=self._parts.loop.num_waiting,
            running=self._parts.loop.num_running,
            holding=self._transceiver.num_sending,
            receiving=self._transceiver.num_receiving,
            peers=tuple(PeerStatus(worker, role, lane) for worker, (role, lane) in lanes.items()),
            integrity=_integrity(manager),
            process_id=os.getpid(),
            condition=self._parts.loop.condition,
        )

    async def _pair(self, info: RankInfo) -> None:
        await asyncio.wrap_future(self._transceiver.pair(info))

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        if self._config.role.decodes:
            self._spawn(self._network.update(snapshot.members, lambda entry: entry.role.prefills), "follow the members")

    def _on_replaced(self, error: KVError) -> None:
        self.failure = error
        self.failed.set()

    def _on_paired(self, workers: frozenset[WorkerId]) -> None:
        if self._directory is not None:
            self._directory.set_paired(workers)
        self._spawn(self._show_health(), "show health")

    async def _show_health(self) -> None:
        """Serving means able to take requests and move bytes: paired with somebody, or complete alone."""
        able = bool(self._network.paired) or self._config.role is Role.BOTH
        await self._server.set_serving(able and self._parts.loop.condition == OK and not self._stopping)

    async def _abandon(self) -> None:
        """Let peers hear how every open attempt ended, so that their pages do not stay in doubt."""
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await asyncio.wrap_future(self._transceiver.abandon(f"{self._worker} is shutting down"))
                while await asyncio.wrap_future(self._transceiver.num_unanswered()):  # noqa: ASYNC110 - another thread's
                    await asyncio.sleep(ANSWERED_POLL_SECONDS)

    def _hang_up(self, worker: WorkerId, reason: str) -> None:
        self._asyncio.call_soon_threadsafe(self._network.hang_up, worker, reason)

    def _on_condition(self) -> None:
        self._asyncio.call_soon_threadsafe(lambda: self._spawn(self._show_health(), "show health"))

    def _fail(self) -> None:
        self._asyncio.call_soon_threadsafe(self.failed.set)

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = background(work, name)
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)


def _integrity(manager: CacheManager) -> str:
    try:
        manager.check_integrity()
    except InvariantError as error:
        return error.story
    return "ok"


async def run_worker(config: WorkerConfig, parts: Parts, stop: asyncio.Event, endpoint_file: Path | None) -> int:
    """Serve with these parts until `stop` is set or the worker breaks. Returns the exit code, or raises why it ended.

    Args:
        endpoint_file: HOST:PORT is written there once the worker serves.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        ucx_log = prepare_environment(os.environ, Path(folder, "ucx.log"))
        worker = Worker(config, parts, ucx_log)
        serving = asyncio.ensure_future(_serve(worker, endpoint_file))
        try:
            await _first_of(stop.wait(), worker.failed.wait(), serving)
        finally:
            ended = await worker.stop()
    if worker.failure is not None:
        raise worker.failure
    return EXIT_OK if ended and not worker.failed.is_set() else EXIT_FAILED


async def _serve(worker: Worker, endpoint_file: Path | None) -> None:
    """Start, say where, and go on for ever. Raises what `Worker.start` raises."""
    endpoint = await worker.start()
    if endpoint_file is not None:
        write_endpoint(endpoint_file, endpoint)
    log.info("serving at %s", endpoint)
    await asyncio.Event().wait()


async def _first_of(*works: Awaitable[object]) -> None:
    """Wait until one of them ends, cancel the others, and raise its error if it has one."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
