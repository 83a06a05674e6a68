"""The frontend process: it embeds the directory, picks workers for each request and passes their tokens on."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Container, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.cache.errors import (
    CapacityError,
    ConfigError,
    KVError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    Unavailable,
)
from kvferry.deploy.config import FrontendConfig
from kvferry.deploy.process import EXIT_OK, write_endpoint
from kvferry.deploy.side_by_side import side_by_side, with_prefill
from kvferry.transfer.control.background import background, end
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.control.directory import Directory
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.inference import (
    DecodeCall,
    DirectoryEntry,
    GenerateCall,
    GenerateEvent,
    GenerateSummary,
    PrefillReply,
)
from kvferry.transfer.types import Role, TransferKey, WorkerId

log = logging.getLogger(__name__)

CANCEL_SECONDS = 5.0
SETTLE_SECONDS = 2.0
MAX_ROUTES = 3
BUSY_OR_GONE = (Unavailable, CapacityError)
"""Errors of one worker that another one need not have."""
MAX_NAMED = 10
AVOID_SECONDS = 5.0
"""A worker that fails at once is the least loaded of all: without this pause it would be given every request."""


@dataclass(frozen=True)
class Route:
    """The worker that prefills and the one that decodes; the same one when nothing has to move."""

    prefill: DirectoryEntry
    decode: DirectoryEntry

    @property
    def ends(self) -> tuple[WorkerId, WorkerId]:
        """Which two workers it is; what else is known of them changes."""
        return self.prefill.worker, self.decode.worker

    @property
    def aggregated(self) -> bool:
        return self.prefill.worker == self.decode.worker


def routes(members: tuple[DirectoryEntry, ...]) -> Iterator[Route]:
    """Every pair of members that may serve a request: alone with role both, or paired with each other.

    Two workers of role both never serve each other: each could do it alone, and if both had filled their pools with
    prompts for the other, neither could take one.
    """
    for prefill in members:
        for decode in members:
            if prefill.role is Role.BOTH and decode.role is Role.BOTH:
                possible = prefill.worker == decode.worker
            else:
                possible = prefill.role.prefills and decode.role.decodes and _paired(prefill, decode)
            if possible:
                yield Route(prefill, decode)


def _paired(one: DirectoryEntry, other: DirectoryEntry) -> bool:
    return other.worker in one.paired and one.worker in other.paired


class Router:
    """Spreads requests over routes: those that failed lately last, least loaded first, longest unused among equals.

    Concurrency: one asyncio loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: dict[frozenset[WorkerId], float] = {}
        self._load: Counter[WorkerId] = Counter()
        self._last_used: dict[tuple[WorkerId, WorkerId], int] = {}
        self._turn = 0

    def pick(self, members: tuple[DirectoryEntry, ...], tried: Container[tuple[WorkerId, WorkerId]] = ()) -> Route:
        """Raises Unavailable, naming the members there are, when no route exists but those that were tried."""
        candidates = [route for route in routes(members) if route.ends not in tried]
        if not candidates:
            named = [f"{entry.worker.name} ({entry.role.value})" for entry in members[:MAX_NAMED]]
            rest = len(members) - len(named)
            names = ", ".join([*named, f"{rest} more"] if rest else named) or "none"
            raise Unavailable(
                f"no prefill worker is paired with a decode worker; members: {names}. Start the missing role, or look "
                "in the workers' logs for why they do not pair",
                peer="directory",
            )
        route = min(candidates, key=self._rank)
        self._turn += 1
        self._last_used[route.prefill.worker, route.decode.worker] = self._turn
        return route

    def start(self, route: Route) -> None:
        self._load.update({route.prefill.worker, route.decode.worker})

    def end(self, route: Route) -> None:
        self._load.subtract({route.prefill.worker, route.decode.worker})
        self._load = +self._load

    @contextmanager
    def blaming(self, errors: tuple[type[KVError], ...], *workers: WorkerId) -> Iterator[None]:
        """When the body fails with one of these, avoid for a while the routes over all these workers.

        A request that could never fit is nobody's fault but its own.
        """
        try:
            yield
        except errors as error:
            if not (isinstance(error, CapacityError) and error.permanent):
                self._failed[frozenset(workers)] = self._clock()
            raise

    def is_avoided(self, route: Route) -> bool:
        """Whether a worker of this route, or the pair, failed a moment ago."""
        return self._is_avoided(route.ends)

    def is_loaded(self, worker: WorkerId) -> bool:
        return self._load[worker] > 0

    def forget(self, members: tuple[DirectoryEntry, ...]) -> None:
        """Drop what is remembered of workers that are gone."""
        known = {entry.worker for entry in members}
        self._failed = {workers: at for workers, at in self._failed.items() if known.issuperset(workers)}
        self._last_used = {pair: turn for pair, turn in self._last_used.items() if known.issuperset(pair)}

    def _rank(self, route: Route) -> tuple[bool, int, int]:
        pair = (route.prefill.worker, route.decode.worker)
        return self._is_avoided(pair), sum(self._load[worker] for worker in set(pair)), self._last_used.get(pair, 0)

    def _is_avoided(self, pair: tuple[WorkerId, WorkerId]) -> bool:
        since = self._clock() - AVOID_SECONDS
        return any(at > since and workers.issubset(pair) for workers, at in self._failed.items())


class Frontend:
    """Answers clients.

    Concurrency: one asyncio loop.
    """

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._directory = Directory(
            min_lease_seconds=config.min_lease_seconds, max_lease_seconds=config.max_lease_seconds
        )
        self._server = ControlServer(config.listen, directory=self._directory, inference=self)
        self._router = Router()
        self._schedules = {"context_first": self._context_first, "generation_first": self._generation_first}
        self._clients: dict[WorkerId, InferenceClient] = {}
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Serve. Returns HOST:PORT. Raises ConfigError."""
        await self._server.start()
        self._spawn(self._follow_members(), "following the members")
        return self._server.address

    async def stop(self) -> None:
        """Let running requests end for a moment, cut off the others and take back their prompts from the workers."""
        await self._server.set_serving(False)
        self._directory.close()
        await self._server.stop()
        await self._settle()
        for client in self._clients.values():
            await client.close()

    # ---- InferenceHandler

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        call = self._checked(call)
        deadline = time.monotonic() + call.timeout_seconds
        self._inflight += 1
        self._idle.clear()
        try:
            async with aclosing(self._served(call, deadline)) as events:
                async for event in events:
                    yield event
        finally:
            self._inflight -= 1
            if self._inflight == 0:
                self._idle.set()
            self._spawn(self._close_unused(self._directory.snapshot.members), "closing unused connections")

    async def prefill(self, call: GenerateCall) -> PrefillReply:
        raise ConfigError("a frontend does not prefill: call Generate, or a prefill worker")

    def decode(self, call: DecodeCall) -> AsyncGenerator[GenerateEvent, None]:
        raise ConfigError("a frontend does not decode: call Generate, or a decode worker")

    async def cancel(self, key: TransferKey, reason: str) -> None:
        raise ConfigError("a frontend holds no transfers: end the Generate call instead")

    async def tokenize(self, prompt: str, chat: bool) -> tuple[int, ...]:
        raise ConfigError("a frontend has no model: ask a worker")

    # ---- private

    def _checked(self, call: GenerateCall) -> GenerateCall:
        if self._inflight >= self._config.max_inflight_requests:
            raise CapacityError(
                f"{self._inflight} requests are being answered, the limit is max_inflight_requests: retry later",
                requested=(1,),
                available=(0,),
            )
        if (call.prompt is None) == (call.prompt_token_ids is None):
            raise ConfigError("give either a prompt or prompt_token_ids")
        if call.key is not None:
            raise ConfigError(f"transfer {call.key} is named, but keys are made by the frontend: leave it out")
        if not (call.prompt or call.prompt_token_ids):
            raise ConfigError("the prompt is empty: give at least one token")
        timeout = min(call.timeout_seconds, self._config.max_request_timeout_seconds)
        return replace(call, request_id=call.request_id or uuid.uuid4().hex, timeout_seconds=timeout)

    async def _served(self, call: GenerateCall, deadline: float) -> AsyncGenerator[GenerateEvent, None]:
        """Over one route, or another where a worker is gone or takes nothing now and nothing reached the client yet."""
        tried: set[tuple[WorkerId, WorkerId]] = set()
        started = False
        while True:
            route = self._router.pick(self._directory.snapshot.members, tried)
            tried.add(route.ends)
            log.info("request %s: prefill %s, decode %s", call.request_id, route.prefill.worker, route.decode.worker)
            remaining = replace(call, timeout_seconds=_seconds_until(deadline))
            try:
                async with aclosing(self._over(route, remaining)) as events:
                    async for event in events:
                        started = True
                        yield event
                return
            except (*BUSY_OR_GONE, TransferError) as error:
                final = isinstance(error, TransferCancelled | TransferTimeout) or getattr(error, "permanent", False)
                others = [each for each in routes(self._directory.snapshot.members) if each.ends not in tried]
                # A prompt is not computed again for workers that had no room a moment ago either.
                full = isinstance(error, CapacityError) and all(map(self._router.is_avoided, others))
                if started or final or full or not others or len(tried) == MAX_ROUTES:
                    raise
                log.warning("request %s goes over another route: %s", call.request_id, error)

    async def _over(self, route: Route, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        self._router.start(route)
        try:
            run = self._aggregated if route.aggregated else self._schedules[self._config.schedule]
            async with aclosing(run(call, route)) as events:
                async for event in events:
                    yield event
        finally:
            self._router.end(route)

    async def _aggregated(self, call: GenerateCall, route: Route) -> AsyncGenerator[GenerateEvent, None]:
        with self._router.blaming(BUSY_OR_GONE, route.prefill.worker):
            async with aclosing(self._client(route.prefill).generate(call)) as events:
                async for event in events:
                    yield event

    async def _context_first(self, call: GenerateCall, route: Route) -> AsyncGenerator[GenerateEvent, None]:
        """Decode is asked once the prompt is computed."""
        deadline = time.monotonic() + call.timeout_seconds
        reply = await self._prefilled(call, route)
        decode_call = _decode_call(call, reply.key, reply.sender, reply.prompt_token_ids, deadline)
        async with aclosing(self._ending_both(reply.key, route, self._decoded(decode_call, route))) as events:
            async for event in events:
                yield with_prefill(event, reply) if isinstance(event, GenerateSummary) else event

    async def _generation_first(self, call: GenerateCall, route: Route) -> AsyncGenerator[GenerateEvent, None]:
        """Both are asked at the same time, under a key that is made here."""
        deadline = time.monotonic() + call.timeout_seconds
        tokens = call.prompt_token_ids or await self._tokenized(call, route)
        key = TransferKey(uuid.uuid4().hex, 1)
        prefill_call = replace(
            call, key=key, prompt=None, prompt_token_ids=tokens, timeout_seconds=_seconds_until(deadline)
        )
        decode_call = _decode_call(call, key, route.prefill.worker, tokens, deadline, early=True)
        both = side_by_side(self._prefilled(prefill_call, route), self._decoded(decode_call, route))
        async with aclosing(self._ending_both(key, route, both)) as events:
            async for event in events:
                yield event

    async def _ending_both(
        self, key: TransferKey, route: Route, events: AsyncGenerator[GenerateEvent, None]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Pass events on. Unless they end with a summary, no worker is left with any part of the attempt."""
        done = False
        try:
            async with aclosing(events):
                async for event in events:
                    done = isinstance(event, GenerateSummary)
                    yield event
        finally:
            if not done:
                self._spawn(self._cancel(route, key), f"cancelling {key}")

    async def _cancel(self, route: Route, key: TransferKey) -> None:
        """Tell both workers. They count as loaded meanwhile, so that their clients stay open."""
        self._router.start(route)
        try:
            cancels = (_cancel(self._client(entry), key) for entry in (route.prefill, route.decode))
            await asyncio.wait([background(each, f"cancelling {key}") for each in cancels], timeout=2 * CANCEL_SECONDS)
        finally:
            self._router.end(route)

    async def _tokenized(self, call: GenerateCall, route: Route) -> tuple[int, ...]:
        with self._router.blaming(BUSY_OR_GONE, route.prefill.worker):
            return await self._client(route.prefill).tokenize(call.prompt or "", call.chat, call.timeout_seconds)

    async def _prefilled(self, call: GenerateCall, route: Route) -> PrefillReply:
        with self._router.blaming(BUSY_OR_GONE, route.prefill.worker):
            return await self._client(route.prefill).prefill(call)

    async def _decoded(self, call: DecodeCall, route: Route) -> AsyncGenerator[GenerateEvent, None]:
        alone = self._router.blaming(BUSY_OR_GONE, route.decode.worker)
        together = self._router.blaming((TransferError,), route.prefill.worker, route.decode.worker)
        with alone, together:
            async with aclosing(self._client(route.decode).decode(call)) as events:
                async for event in events:
                    yield event

    def _client(self, entry: DirectoryEntry) -> InferenceClient:
        if entry.worker not in self._clients:
            self._clients[entry.worker] = InferenceClient(entry.endpoint)
        return self._clients[entry.worker]

    async def _follow_members(self) -> None:
        """Keep health and clients in step with the membership."""
        async for snapshot in self._directory.watch():
            await self._server.set_serving(any(True for _ in routes(snapshot.members)))
            self._router.forget(snapshot.members)
            await self._close_unused(snapshot.members)

    async def _close_unused(self, members: tuple[DirectoryEntry, ...]) -> None:
        """Close clients of workers that are gone, once no request runs on them."""
        gone = self._clients.keys() - {entry.worker for entry in members}
        for worker in gone:
            if not self._router.is_loaded(worker):
                await self._clients.pop(worker).close()

    async def _settle(self) -> None:
        """Wait for requests to unwind and for tasks to end, within a deadline; what is left then is cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._idle.wait()
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for task in tuple(self._tasks):
            await end(task)

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = background(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _seconds_until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _decode_call(
    call: GenerateCall,
    key: TransferKey,
    sender: WorkerId,
    token_ids: tuple[int, ...],
    deadline: float,
    *,
    early: bool = False,
) -> DecodeCall:
    return DecodeCall(
        request_id=call.request_id,
        key=key,
        sender=sender,
        prompt_token_ids=token_ids,
        sampling=call.sampling,
        timeout_seconds=_seconds_until(deadline),
        cache_salt=call.cache_salt,
        early=early,
    )


async def _cancel(worker: InferenceClient, key: TransferKey) -> None:
    with suppress(KVError):
        await worker.cancel(key, "the request ended before its pages were taken", CANCEL_SECONDS)


async def run_frontend(config: FrontendConfig, stop: asyncio.Event, endpoint_file: Path | None) -> int:
    """Run a frontend until `stop` is set. Returns the exit code."""
    frontend = Frontend(config)
    endpoint = await frontend.start()
    try:
        if endpoint_file is not None:
            write_endpoint(endpoint_file, endpoint)
        log.info("frontend serves at %s", endpoint)
        await stop.wait()
    finally:
        await frontend.stop()
    return EXIT_OK
