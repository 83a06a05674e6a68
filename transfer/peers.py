"""The peers of one worker, as the thread that owns the transport sees them."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from kvferry.cache.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.transfer import compatibility
from kvferry.transfer.plan import PairPlanner, run_list
from kvferry.transfer.transport.base import DescriptorList, Transport
from kvferry.transfer.types import RankInfo, WorkerId

FORGET_SECONDS = 30.0
"""How long a peer may be without a control stream: one that comes back sooner finds everything wired."""


@dataclass
class Peer:
    """One paired worker: how to plan for it, and its memory as runs to write to.

    Attributes:
        channels: live control streams with it; None before the first since it was paired.
        lost_at: when the last stream was lost, on the transceiver's clock, in seconds; before the first stream, when it
            was first missed, and 0 before that.
        broken: a write to it failed, and its lane has to be wired again.
    """

    info: RankInfo
    agent: str
    planner: PairPlanner
    runs: DescriptorList
    channels: int | None = None
    lost_at: float = 0.0
    broken: bool = False


class PeerBook:
    """Pairs with peers and forgets them. Plans and run lists are made once per peer incarnation.

    Concurrency: the thread that owns the transport.
    """

    def __init__(self, local: RankInfo, transport: Transport) -> None:
        self._local = local
        self._transport = transport
        self._peers: dict[WorkerId, Peer] = {}
        self._device_index = _device_index(local)
        self.own_runs = transport.prepare(None, run_list(local.page_table.pools, self._device_index))

    def __iter__(self) -> Iterator[Peer]:
        return iter(tuple(self._peers.values()))

    def pair(self, info: RankInfo) -> None:
        """Validate a peer and wire it. Pairing again with the same incarnation only mends a broken lane.

        Raises:
            IncompatiblePeer: with every difference. TransportError: its metadata or memory cannot be used.
        """
        reasons = compatibility.check(self._local, info)
        if reasons:
            raise IncompatiblePeer(str(info.worker), reasons)
        known = self._peers.get(info.worker)
        if known is not None and not known.broken:
            # It is about to open a stream: a loss that is noticed late belongs to an earlier one.
            if not known.channels:
                known.channels, known.lost_at = None, 0.0
            return
        self._check_agent(info)
        for stale in [worker for worker in self._peers if worker.name == info.worker.name]:
            self.forget(stale)
        self._peers[info.worker] = self._wired(info)

    def _check_agent(self, info: RankInfo) -> None:
        """Forgetting one of two workers that share an agent would cut off the other."""
        for peer in self._peers.values():
            if peer.agent == info.agent_name and peer.info.worker.name != info.worker.name:
                raise RemoteProtocolError(
                    f"{info.worker} says agent {info.agent_name!r}, which is that of {peer.info.worker}: every worker "
                    "has an agent of its own"
                )

    def _wired(self, info: RankInfo) -> Peer:
        """Connect to a peer's agent; when its memory is not what it says, disconnect again."""
        planner = PairPlanner(self._local.page_table, info.page_table)
        agent = self._transport.connect(info.agent_metadata)
        try:
            if agent != info.agent_name:
                raise RemoteProtocolError(f"{info.worker} says agent {info.agent_name!r}, its metadata says {agent!r}")
            runs = self._transport.prepare(agent, run_list(info.page_table.pools, _device_index(info)))
        except BaseException:
            if all(peer.agent != agent for peer in self._peers.values()):
                self._transport.disconnect(agent)
            raise
        return Peer(info, agent, planner, runs)

    def find(self, worker: WorkerId) -> Peer | None:
        return self._peers.get(worker)

    def mark_broken(self, worker: WorkerId) -> None:
        """Have this peer wired again at its next pairing."""
        peer = self._peers.get(worker)
        if peer is not None:
            peer.broken = True

    def on_channel(self, worker: WorkerId, change: int, now: float) -> None:
        """A control stream with this peer came up (+1) or was lost (-1)."""
        peer = self._peers.get(worker)
        if peer is not None:
            peer.channels = max(0, (peer.channels or 0) + change)
            peer.lost_at = now

    def forget_lost(self, now: float, in_use: Container[WorkerId]) -> None:
        """Drop peers that have had no stream for a while, unless an attempt still refers to them."""
        for worker, peer in tuple(self._peers.items()):
            if peer.channels is None and not peer.lost_at:
                peer.lost_at = now
            if not peer.channels and now >= peer.lost_at + FORGET_SECONDS and worker not in in_use:
                self.forget(worker)

    def forget(self, worker: WorkerId) -> None:
        """Drop a peer and its lane. Unknown peers are ignored."""
        peer = self._peers.pop(worker, None)
        if peer is not None:
            peer.runs.release()
            self._transport.disconnect(peer.agent)

    def close(self) -> None:
        for worker in tuple(self._peers):
            self.forget(worker)
        self.own_runs.release()


def _device_index(info: RankInfo) -> int:
    _, _, index = info.page_table.device.partition(":")
    return int(index or 0)
