"""A registered member of the cluster, inside the test's process, that says to workers whatever a test wants it to say.

It pairs like any worker of role both: it has pools, a NIXL agent that registered them, and a control server. Only its
words about transfers are not those of a transceiver.
"""

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import numpy as np

from kvferry.cache.page_table import BlockLists
from kvferry.deploy.config import WorkerConfig
from kvferry.deploy.pools import build_manager
from kvferry.transfer.control.directory_client import DirectoryClient
from kvferry.transfer.control.network import PeerNetwork
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.engines.hf import HfEngine
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.inference import DirectoryEntry, WorkerStatus
from kvferry.transfer.transport.nixl import NixlTransport
from kvferry.transfer.types import (
    Cancel,
    Failure,
    Grant,
    Message,
    Permit,
    Phase,
    RankInfo,
    Renewal,
    ResultStatus,
    Role,
    TransferResult,
    WorkerId,
)
from tests.end_to_end import direct
from tests.end_to_end.serving import Service
from tests.helpers import wait_until

ROGUE_SECONDS = 15.0
Result = TypeVar("Result")


def rank_of(worker: WorkerId, settings: dict[str, Any]) -> tuple[RankInfo, NixlTransport]:
    """What a worker with these settings says of itself, and the agent whose memory it names."""
    config = WorkerConfig.model_validate({**settings, "role": "both", "name": worker.name, "directory": "127.0.0.1:1"})
    engine = HfEngine(load_model(config.model))
    manager = build_manager(config, engine.spec, config.max_seq_len_tokens or engine.max_seq_len_tokens)
    transport = NixlTransport(f"{worker.name}-{worker.incarnation:016x}")
    transport.register(manager.storage.pools)
    names = {"agent_name": transport.agent_name, "agent_metadata": transport.metadata()}
    facts = {"transport": transport.name, "model_digest": engine.model_digest, "manager": manager.version}
    return RankInfo(worker, Role.BOTH, 0, 1, page_table=manager.page_table(), **names, **facts), transport


class Rogue:
    """Keeps what workers say to it, and says what it is told.

    Attributes:
        answer: what it says to a grant; nothing by default.
        heard: permits, results and the like, in the order they came.

    Concurrency: a thread with a loop of its own; the methods are for the test's.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.worker = WorkerId("rogue", secrets.randbits(63))
        self.answer: Callable[[Grant], Message | None] = lambda grant: None
        self.heard: list[Message] = []
        self._rank, self._transport = rank_of(self.worker, settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rogue", daemon=True)
        self._thread.start()

    def join(self, service: Service) -> None:
        """Serve, become a member, dial the prefill worker, and wait until decode workers dialled."""
        self._run(self._join(service.endpoint))
        members = {child.name: child.endpoint for child in service.workers}
        peers = {name: direct.status(service, name) for name in members}
        prefills = [status for status in peers.values() if status.role is Role.PREFILL]
        for status in prefills:
            entry = DirectoryEntry(status.worker, status.role, str(members[status.worker.name]), status.model)
            self._run(self._network.connect(entry))
        wanted = {status.worker for status in peers.values()}
        wait_until(lambda: wanted <= self._network.paired, ROGUE_SECONDS, "every worker is paired with the rogue")

    def say(self, worker: WorkerId, message: Message) -> None:
        """Send a message on the channel that is for it."""
        assert self._network.send(worker, message), f"no channel to {worker}"

    def wait_result(self) -> TransferResult:
        """The next result that was not waited for before."""

        def found() -> TransferResult | None:
            return next((message for message in self.heard if isinstance(message, TransferResult)), None)

        wait_until(found, ROGUE_SECONDS, "a result came")
        result = found()
        assert result is not None
        self.heard.remove(result)
        return result

    def pages(self, num_blocks: int, first_slot: int = 0) -> BlockLists:
        """Different slots of its own for so many blocks of every layer group."""
        groups = range(len(self._rank.page_table.layer_groups))
        slots = [np.arange(num_blocks, dtype=np.int32) + first_slot + group * num_blocks for group in groups]
        return BlockLists(tuple(slots), tuple(np.zeros(num_blocks, np.uint32) for _ in groups))

    @property
    def num_slots(self) -> int:
        return min(pool.num_slots for pool in self._rank.page_table.pools)

    def close(self) -> None:
        self._run(self._leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ROGUE_SECONDS)
        self._loop.close()
        self._transport.close()

    # ---- ChannelSink

    def on_grant(self, peer: WorkerId, grant: Grant) -> None:
        message = self.answer(grant)
        if message is not None:
            self._network.send(peer, message)

    def on_permit(self, peer: WorkerId, permit: Permit) -> None:
        self.heard.append(permit)

    def on_result(self, peer: WorkerId, result: TransferResult) -> None:
        self.heard.append(result)

    def on_cancel(self, peer: WorkerId, cancel: Cancel) -> None:
        """It never writes, so it may say that nothing is under way."""
        failure = Failure("failed", Phase.WIRE, "the rogue has nothing under way")
        quiet = TransferResult(
            cancel.key, self.worker, peer, ResultStatus.FAILED, cancel.fence, quiet=True, failure=failure
        )
        self._network.send(peer, quiet)

    def on_renewal(self, peer: WorkerId, renewal: Renewal) -> None:
        self.heard.append(renewal)

    def on_channel_up(self, peer: WorkerId) -> None:
        pass

    def on_channel_lost(self, peer: WorkerId, reason: str) -> None:
        pass

    # ---- private

    async def _join(self, directory: str) -> None:
        self._network = PeerNetwork(lambda: self._rank, self._pair, self, self._status)
        self._server = ControlServer("127.0.0.1:0", peer=self._network, transfer=self._network)
        await self._server.start()
        entry = DirectoryEntry(self.worker, self._rank.role, self._server.address, "any")
        self._directory = DirectoryClient(directory, on_snapshot=lambda snapshot: None, entry=entry)
        self._directory.start()
        await self._directory.wait_joined(ROGUE_SECONDS)

    async def _leave(self) -> None:
        await self._directory.leave(1.0)
        await self._network.close()
        await self._server.stop(0.2)

    async def _pair(self, info: RankInfo) -> None:
        """Whoever comes is welcome; it never writes to them, so it does not load their metadata."""

    async def _status(self) -> WorkerStatus:
        raise NotImplementedError

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ROGUE_SECONDS)


@contextlib.contextmanager
def joined(service: Service, settings: dict[str, Any]) -> Iterator[Rogue]:
    """A rogue that is a member while the context lasts."""
    rogue = Rogue(settings)
    try:
        rogue.join(service)
        yield rogue
    finally:
        rogue.close()
