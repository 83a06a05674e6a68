"""The rule that says when nothing a peer started can touch our memory any more. Pure: facts in, verdict out.

A peer that is alive may go on at any time, however long it was silent and whatever we deregistered. Once its process is
gone it starts nothing more. Over tcp that is not enough: the kernel still holds bytes it sent, and these land through
our own progress.
"""

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvferry.transfer.transport.base import Quiescence


class Fact(NamedTuple):
    """Whether a condition is known to hold, for good, and why or why not. False means: not known."""

    holds: bool
    story: str


class Condition(enum.Enum):
    """What a proof may need."""

    WRITER_GONE = enum.auto()
    """No thread of the process of the peer runs or will run."""
    STREAMS_DRAINED = enum.auto()
    """All bytes sent to our sockets before the writer was gone have been read, or the sockets are closed."""
    KEY_INVALIDATED = enum.auto()
    """The network adapter refuses the remote key that the peer has of our memory."""


NEEDED: Mapping[str, frozenset[Condition]] = {
    "cma": frozenset({Condition.WRITER_GONE}),
    "cuda_ipc": frozenset({Condition.WRITER_GONE}),
    "memcpy": frozenset({Condition.WRITER_GONE}),
    # The writer's own stores. UCX also has shared-memory queues that the target empties, which would need more, but for
    # want of failure detection NIXL does not use them (a contract test says so).
    "shm": frozenset({Condition.WRITER_GONE}),
    "tcp": frozenset({Condition.WRITER_GONE, Condition.STREAMS_DRAINED}),
    "rdma": frozenset({Condition.KEY_INVALIDATED}),
}
"""Per lane, all that must hold."""

_UNVERIFIED = ("cuda_ipc", "rdma")
"""Lanes for which the rule was not tried on the hardware."""


def judge(lane: str, possible: Iterable[str], facts: Mapping[Condition, Fact]) -> Quiescence:
    """Whether the peer's writes and reads over a lane are over.

    Args:
        lane: what the peer used, several joined by "+". A name that is not in `NEEDED` counts as every possible lane.
        possible: lanes there can be on this machine, all in `NEEDED`.
        facts: what is known; a condition that is left out is not known to hold.
    """
    lanes = _lanes(lane, possible)
    needed = sorted(frozenset[Condition]().union(*(NEEDED[name] for name in lanes)), key=lambda each: each.value)
    known = [facts[condition] for condition in needed if condition in facts]
    proven = 0 < len(needed) == len(known) and all(fact.holds for fact in known)
    stories = [fact.story for fact in known if fact.holds == proven] or ["too little is known"]
    doubts = [f"not verified on {name} hardware" for name in lanes if proven and name in _UNVERIFIED]
    return Quiescence(proven, f"over {' or '.join(lanes)}: {'; '.join(stories + doubts)}")


def _lanes(lane: str, possible: Iterable[str]) -> list[str]:
    names = set(lane.split("+"))
    return sorted(names if names <= NEEDED.keys() else (names & NEEDED.keys()) | set(possible))


class Stream(NamedTuple):
    """One TCP connection of this process.

    Attributes:
        inode: names the socket.
        title: for people.
        read: bytes we have read from it so far.
        sent: bytes its other end has sent so far, at most; None when that cannot be bounded now.
    """

    inode: int
    title: str
    read: int
    sent: int | None


class Drain:
    """Follows our connections until all that had been sent on them at the first look has been read.

    It need not be known whose connection is whose: the other end of a dead process's connection says no longer whose
    it was, and a child of that process may hold it open.
    """

    def __init__(self) -> None:
        self._marks: dict[int, int] = {}
        self._done = False

    def look(self, streams: Iterable[Stream]) -> Fact:
        """Take in one look at all our connections. Once it held, it holds for good."""
        waiting = [] if self._done else [stream.title for stream in streams if not self._passed(stream)]
        self._done = not waiting
        if waiting:
            more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
            return Fact(False, f"bytes sent before may still arrive through {', '.join(waiting[:3])}{more}")
        return Fact(True, "all that was sent to our sockets before has been read")

    def _passed(self, stream: Stream) -> bool:
        """Each look bounds what was sent before the first one, so the lowest bound counts."""
        bounds = [bound for bound in (self._marks.get(stream.inode), stream.sent) if bound is not None]
        if not bounds:
            return False
        self._marks[stream.inode] = min(bounds)
        return stream.read >= self._marks[stream.inode]
