"""Workers over real gRPC on loopback, all in one event loop, and what their sinks saw."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

from kvferry.cache.errors import Incompatibility, IncompatiblePeer
from kvferry.transfer.control.network import PeerNetwork
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.inference import DirectoryEntry, WorkerStatus
from kvferry.transfer.types import Cancel, Grant, Permit, RankInfo, Renewal, Role, TransferResult, WorkerId
from tests.control import samples

TEST_SECONDS = 15.0
POLL_SECONDS = 0.005


def run(test: Callable[[], Coroutine[object, object, None]]) -> None:
    """Run an asynchronous test with a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(TEST_SECONDS):
            await test()

    asyncio.run(bounded())


async def wait_until(predicate: Callable[[], object], what: str, timeout_seconds: float = 8.0) -> None:
    """Poll the predicate on the running loop. Raises AssertionError naming `what`."""
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    while not predicate():
        assert asyncio.get_running_loop().time() < deadline, f"not within {timeout_seconds} s: {what}"
        await asyncio.sleep(POLL_SECONDS)


class RecordingSink:
    """Keeps what a network delivered, in order."""

    def __init__(self) -> None:
        self.grants: list[tuple[WorkerId, Grant]] = []
        self.permits: list[tuple[WorkerId, Permit]] = []
        self.results: list[tuple[WorkerId, TransferResult]] = []
        self.cancels: list[tuple[WorkerId, Cancel]] = []
        self.renewals: list[tuple[WorkerId, Renewal]] = []
        self.up: list[WorkerId] = []
        self.lost: list[tuple[WorkerId, str]] = []

    def on_grant(self, peer: WorkerId, grant: Grant) -> None:
        self.grants.append((peer, grant))

    def on_permit(self, peer: WorkerId, permit: Permit) -> None:
        self.permits.append((peer, permit))

    def on_result(self, peer: WorkerId, result: TransferResult) -> None:
        self.results.append((peer, result))

    def on_cancel(self, peer: WorkerId, cancel: Cancel) -> None:
        self.cancels.append((peer, cancel))

    def on_renewal(self, peer: WorkerId, renewal: Renewal) -> None:
        self.renewals.append((peer, renewal))

    def on_channel_up(self, peer: WorkerId) -> None:
        self.up.append(peer)

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        self.lost.append((peer, reason))


class Worker:
    """One worker's server and network. `refusals` makes its side of pairing fail."""

    def __init__(self, worker: WorkerId, role: Role = Role.BOTH, keepalive_seconds: float = 5.0) -> None:
        self.id = worker
        self.role = role
        self.sink = RecordingSink()
        self.refusals: list[Incompatibility] = []
        self.pairings: list[WorkerId] = []
        self.paired_changes: list[frozenset[WorkerId]] = []
        self.network = PeerNetwork(
            lambda: samples.rank(worker, role),
            self._pair,
            self.sink,
            self._status,
            on_paired=self.paired_changes.append,
            keepalive_seconds=keepalive_seconds,
        )
        self.server = ControlServer(
            "127.0.0.1:0", peer=self.network, transfer=self.network, keepalive_seconds=keepalive_seconds
        )

    @property
    def entry(self) -> DirectoryEntry:
        return samples.entry(self.id, self.server.address, self.role)

    async def _pair(self, info: RankInfo) -> None:
        self.pairings.append(info.worker)
        if self.refusals:
            raise IncompatiblePeer(str(info.worker), self.refusals)

    async def _status(self) -> WorkerStatus:
        return samples.status(self.id)

    async def stop(self) -> None:
        await self.network.close()
        await self.server.stop(0.2)


@asynccontextmanager
async def workers(*members: Worker) -> AsyncIterator[None]:
    """Start their servers; afterwards close networks and servers."""
    for member in members:
        await member.server.start()
    try:
        yield
    finally:
        await asyncio.gather(*(member.stop() for member in members))


@asynccontextmanager
async def connected_pair() -> AsyncIterator[tuple[Worker, Worker]]:
    """A prefill and a decode worker whose channel, dialled by the decode worker, is up at both ends."""
    prefill, decode = Worker(samples.PREFILL, Role.PREFILL), Worker(samples.DECODE, Role.DECODE)
    async with workers(prefill, decode):
        await decode.network.connect(prefill.entry)
        await wait_until(lambda: decode.sink.up and prefill.sink.up, "the channel is up at both ends")
        yield prefill, decode


@asynccontextmanager
async def closing(*closers: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Await each afterwards."""
    try:
        yield
    finally:
        for close in closers:
            await close()
