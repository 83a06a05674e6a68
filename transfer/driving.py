"""The side that drives the wire: from planned runs to posts, their end, and what they cost."""

from collections import deque
from collections.abc import Callable

from kvferry.cache.errors import TransportError
from kvferry.transfer.notice import Notice
from kvferry.transfer.peers import Peer, PeerBook
from kvferry.transfer.plan import TransferPlan
from kvferry.transfer.poster import Poster, PostJob, PostListener
from kvferry.transfer.transport.base import Operation, Transport
from kvferry.transfer.types import Grant, WireReport


class Driver:
    """Turns plans into posts, with a notice for each.

    Concurrency: the thread that owns the transport.
    """

    def __init__(self, transport: Transport, peers: PeerBook, slice_bytes: int, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._peers = peers
        self._slice_bytes = slice_bytes
        self._poster = Poster(transport, clock)

    @property
    def busy(self) -> bool:
        return self._poster.busy

    def advance(self) -> bool:
        """Post and poll. Returns whether anything moved."""
        return self._poster.advance()

    def start(
        self,
        operation: Operation,
        plan: TransferPlan,
        peer: Peer,
        grant: Grant,
        ready: Callable[[], bool],
        listener: PostListener,
    ) -> PostJob:
        """Queue the posts of a plan. Without a run to move the listener hears nothing."""
        slices = deque(plan.slices(self._slice_bytes))
        key, fence, incarnation, count = grant.key, grant.fence, peer.info.worker.incarnation, len(slices)
        job = PostJob(
            peer=peer.agent,
            local=self._peers.own_runs,
            remote=peer.runs,
            slices=slices,
            notification=lambda index: Notice(key, incarnation, fence, index, count).pack(),
            ready=ready,
            listener=listener,
            operation=operation,
        )
        if slices:
            self._poster.add(job)
        return job

    def abort(self, job: PostJob | None) -> bool:
        """Post no more. Returns whether the transport touches nothing of our memory for it any more."""
        return job is None or self._poster.abort(job)

    def report(self, job: PostJob | None, plan: TransferPlan | None) -> WireReport:
        """What the posts moved and cost."""
        if job is None or plan is None or not job.num_slices:
            return WireReport()
        return WireReport(
            num_slices=job.num_slices,
            num_pages=plan.num_pages,
            num_bytes=plan.num_bytes,
            num_descriptors=job.num_descriptors,
            seconds=max(0.0, job.ended_at - job.started_at),
            lane=self._lane(job.peer),
        )

    def _lane(self, agent: str) -> str:
        """The lane of the last post; a peer that was forgotten meanwhile has none any more."""
        try:
            return self._transport.lane(agent)
        except TransportError:
            return "unknown"
