"""A worker's side of the directory: stay a member, follow the membership."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import replace

from kvferry.cache.errors import ConfigError, DeadlineExceeded, KVError, UnknownMember
from kvferry.transfer.control.background import background, end
from kvferry.transfer.control.backoff import Backoff
from kvferry.transfer.control.convert import checks, common, directory
from kvferry.transfer.control.errors import calling
from kvferry.transfer.control.handlers import Snapshot
from kvferry.transfer.control.parsing import parsed, tolerant
from kvferry.transfer.control.wire import open_channel
from kvferry.transfer.inference import DirectoryEntry
from kvferry.transfer.types import WorkerId
from kvferry.v1 import directory_pb2 as pb
from kvferry.v1.directory_pb2_grpc import DirectoryStub

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
RENEWALS_PER_LEASE = 3


class DirectoryClient:
    """Keeps one worker a member of the directory and calls back with every snapshot.

    Survives a directory that is late, restarts or forgets the worker: it redials and joins again, for ever, with
    bounded delays. Concurrency: everything on one loop; `on_snapshot` must not block.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        on_snapshot: Callable[[Snapshot], None],
        entry: DirectoryEntry | None = None,
        lease_seconds: float = 10.0,
        on_replaced: Callable[[KVError], None] = lambda error: None,
        allow_insecure: bool = False,
    ) -> None:
        """`on_replaced` is called when the directory refuses this life because a newer one took its name: the worker
        is out of service for good.
        """
        self._endpoint = endpoint
        self._channel = open_channel(endpoint, allow_insecure=allow_insecure)
        self._stub = DirectoryStub(tolerant(self._channel))
        self._on_snapshot = on_snapshot
        self._entry = entry
        self._lease_seconds = lease_seconds
        self._on_replaced = on_replaced
        self._joined = asyncio.Event()
        self._paired_changed = asyncio.Event()
        self._last_error: KVError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to join and to watch; returns at once."""
        if self._entry is not None:
            self._spawn(self._stay_member(), "directory membership")
        self._spawn(self._follow(), "directory watch")

    async def wait_joined(self, timeout_seconds: float) -> None:
        """Wait until the directory took this worker in.

        Raises: DeadlineExceeded, or the error of the last try when there was one.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._joined.wait()
        except TimeoutError:
            if self._last_error is not None:
                raise self._last_error from None
            raise DeadlineExceeded(f"did not join within {timeout_seconds:g} s", peer=self._endpoint) from None

    def set_paired(self, workers: Iterable[WorkerId]) -> None:
        """The workers this one has a live channel with; the directory hears of a change at once."""
        if self._entry is None:
            return
        paired = tuple(sorted(workers, key=str))
        if paired != self._entry.paired:
            self._entry = replace(self._entry, paired=paired)
            self._paired_changed.set()

    async def leave(self, timeout_seconds: float = 2.0) -> None:
        """Stop following, tell the directory, close. A directory that does not answer forgets us by itself."""
        while self._tasks:
            await end(self._tasks.pop())
        if self._joined.is_set() and self._entry is not None:
            await self._say_goodbye(self._entry.worker, timeout_seconds)
        self._joined.clear()
        await self._channel.close()

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        self._tasks.append(background(work, name))

    async def _say_goodbye(self, worker: WorkerId, timeout_seconds: float) -> None:
        try:
            with calling(self._endpoint):
                request = pb.LeaveRequest(worker=common.worker_to_wire(worker))
                parsed(await self._stub.Leave(request, timeout=timeout_seconds))
        except KVError as error:
            log.info("%s could not leave the directory, its lease will run out: %s", worker, error)

    # ---- membership

    async def _stay_member(self) -> None:
        backoff = Backoff()
        while True:
            try:
                granted = await self._join()
                backoff.reset()
                await self._renew_until_forgotten(granted)
            except KVError as error:
                self._note(error)
                if isinstance(error, ConfigError):
                    self._on_replaced(error)
                    return
                await asyncio.sleep(backoff.next())

    async def _join(self) -> float:
        assert self._entry is not None
        self._paired_changed.clear()
        request = pb.JoinRequest(entry=directory.entry_to_wire(self._entry), lease_seconds=self._lease_seconds)
        with calling(self._endpoint):
            response = parsed(await self._stub.Join(request, timeout=CALL_SECONDS))
        granted = checks.seconds("JoinResponse.lease_seconds", response.lease_seconds)
        log.info("%s joined the directory at %s for %g s at a time", self._entry.worker, self._endpoint, granted)
        self._last_error = None
        self._joined.set()
        return granted

    async def _renew_until_forgotten(self, lease_seconds: float) -> None:
        """Returns when the directory does not know us any more, or cannot."""
        loop = asyncio.get_running_loop()
        expires_at = loop.time() + lease_seconds
        pause = lease_seconds / RENEWALS_PER_LEASE
        backoff = Backoff(last_seconds=pause)
        while loop.time() < expires_at:
            await self._paired_change(pause)
            asked_at = loop.time()
            try:
                await self._renew(min(CALL_SECONDS, lease_seconds))
            except UnknownMember as error:
                log.warning("%s: %s", self._endpoint, error)
                return
            except KVError as error:
                self._note(error)
                pause = backoff.next()
            else:
                expires_at, pause = asked_at + lease_seconds, lease_seconds / RENEWALS_PER_LEASE
                backoff.reset()

    async def _paired_change(self, timeout_seconds: float) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._paired_changed.wait()
        except TimeoutError:
            return

    async def _renew(self, timeout_seconds: float) -> None:
        assert self._entry is not None
        self._paired_changed.clear()
        paired = [common.worker_to_wire(worker) for worker in self._entry.paired]
        request = pb.RenewRequest(worker=common.worker_to_wire(self._entry.worker), paired=paired)
        with calling(self._endpoint):
            parsed(await self._stub.Renew(request, timeout=timeout_seconds))
        self._last_error = None

    def _note(self, error: KVError) -> None:
        """Log a new trouble once, not at every retry."""
        if str(error) != str(self._last_error):
            log.warning("directory at %s: %s", self._endpoint, error)
        self._last_error = error

    # ---- watch

    async def _follow(self) -> None:
        backoff = Backoff()
        while True:
            try:
                async for snapshot in self._snapshots():
                    backoff.reset()
                    self._on_snapshot(snapshot)
            except KVError as error:
                log.info("watch of the directory at %s ended: %s", self._endpoint, error)
            await asyncio.sleep(backoff.next())

    async def _snapshots(self) -> AsyncIterator[Snapshot]:
        with calling(self._endpoint):
            async for message in self._stub.Watch(pb.WatchRequest()):
                yield directory.snapshot_from_wire(parsed(message))
