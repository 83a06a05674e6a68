"""Posts writes and reads in bounded slices, in round robin over peers, and follows them to their end.

A post may copy its whole payload before it returns, so no job is posted at once: each `advance` hands at most one
slice per peer to the transport and then polls what is under way.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.cache.errors import TransportError
from kvferry.transfer.plan import Slice
from kvferry.transfer.transport.base import DescriptorList, Operation, Post, PostState, Transport

MAX_POSTS_PER_PEER = 2
"""Slices under way at once to one peer: one moves while the next is being handed over."""


class PostListener(Protocol):
    """Told about a job by `Poster.advance`."""

    def posted(self) -> None:
        """The first slice is about to be handed to the transport."""

    def moved(self) -> None:
        """Every slice is done."""

    def failed(self, message: str) -> None:
        """A slice failed. Nothing more is posted; `Poster.abort` must follow."""


@dataclass(eq=False)
class PostJob:
    """The slices of one attempt between here and one peer.

    Attributes:
        notification: payload for the slice of that index.
        ready: whether the device is done with our side of the pages (a device event).
        undelivered: some post ended without being done: the library let go of it, but its bytes may still arrive.
    """

    peer: str
    local: DescriptorList
    remote: DescriptorList
    slices: deque[Slice]
    notification: Callable[[int], bytes]
    ready: Callable[[], bool]
    listener: PostListener
    operation: Operation
    num_slices: int = 0
    num_posted: int = 0
    num_descriptors: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    undelivered: bool = False
    under_way: list[Post] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_slices = len(self.slices)


class Poster:
    """All posts of one transport.

    Concurrency: the thread that owns the transport.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float]) -> None:
        self._transport = transport
        self._clock = clock
        self._queues: dict[str, deque[PostJob]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._queues)

    def add(self, job: PostJob) -> None:
        """Queue a job behind the others of its peer."""
        self._queues.setdefault(job.peer, deque()).append(job)

    def advance(self) -> bool:
        """Post at most one slice per peer, poll all posts, report jobs that ended. Returns whether anything moved."""
        moved = [self._post_next(self._queues[peer]) for peer in list(self._queues)]
        moved += [self._poll(job) for job in self._jobs()]
        self._queues = {peer: jobs for peer, jobs in self._queues.items() if jobs}
        return any(moved)

    def abort(self, job: PostJob) -> bool:
        """Post no more of a job and try to take back what is under way.

        Returns: True when the transport touches nothing of our memory for it any more (whether the peer's may still
            change is `undelivered`); otherwise call again later.
        """
        job.slices.clear()
        self._remove(job)
        job.under_way = [post for post in job.under_way if not self._let_go(job, post)]
        return not job.under_way

    def _jobs(self) -> Iterable[PostJob]:
        return [job for jobs in self._queues.values() for job in jobs]

    def _post_next(self, jobs: deque[PostJob]) -> bool:
        if sum(len(job.under_way) for job in jobs) >= MAX_POSTS_PER_PEER:
            return False
        job = next((job for job in jobs if job.slices), None)
        if job is None or not job.ready():
            return False
        self._post(job)
        return True

    def _post(self, job: PostJob) -> None:
        if job.num_posted == 0:
            job.started_at = self._clock()
            job.listener.posted()
        part = job.slices.popleft()
        payload = job.notification(job.num_posted)
        try:
            post = self._transport.post(job.local, part.local, job.remote, part.remote, payload, job.operation)
        except TransportError as error:
            self._remove(job)
            job.listener.failed(str(error))
            return
        job.num_posted += 1
        job.num_descriptors += post.num_descriptors
        job.under_way.append(post)

    def _poll(self, job: PostJob) -> bool:
        if job not in self._queues.get(job.peer, ()):
            # Stopped meanwhile, by what another job's end led to.
            return False
        before = len(job.under_way)
        for post in list(job.under_way):
            state = self._transport.poll(post)
            if state is PostState.FAILED:
                job.undelivered = True
                self._remove(job)
                job.listener.failed(f"{job.operation.value.lower()} with {job.peer} failed: {post.error}")
                return True
            if state is PostState.DONE:
                job.under_way.remove(post)
                self._transport.release(post)
        if not job.under_way and not job.slices:
            job.ended_at = self._clock()
            self._remove(job)
            job.listener.moved()
        return len(job.under_way) < before

    def _let_go(self, job: PostJob, post: Post) -> bool:
        """Whether our memory is no longer touched. Only a post that is done has also stopped moving bytes."""
        released = self._transport.release(post)
        # Asked last: releasing may be what notices the end.
        job.undelivered = job.undelivered or (released and self._transport.poll(post) is not PostState.DONE)
        return released

    def _remove(self, job: PostJob) -> None:
        jobs = self._queues.get(job.peer)
        if jobs is not None and job in jobs:
            jobs.remove(job)
