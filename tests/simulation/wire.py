"""What is under way between simulated workers, piece by piece, as nobody in the real world can see it.

A post is cut into pieces. Which process moves a piece depends on the lane:

    cma        the poster copies it from one memory to the other; it ends with the poster's process
    tcp WRITE  the poster puts it into the socket, the target's own progress lands it, dead poster or not
    tcp READ   the owner's own progress puts it into the socket, dead poster or not; the poster lands it
"""

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvferry.transfer.notice import Notice
from kvferry.transfer.transport.base import Notification, Operation, Post, PostState
from kvferry.transfer.types import TransferKey
from tests.simulation.content import SLOT_BYTES
from tests.simulation.pool import SimPool


class Run(enum.Enum):
    """What a process does: RUNNING, STOPPED (it may go on later), DEAD (it and its memory are gone)."""

    RUNNING = "running"
    STOPPED = "stopped"
    DEAD = "dead"


class Process(Protocol):
    """One life of a worker, as the wire sees it."""

    agent: str
    run: Run
    pool: SimPool


class Piece(NamedTuple):
    """Bytes inside one page on both sides; offsets into the pools of `group`."""

    group: int
    source: int
    target: int
    num_bytes: int


@dataclass(eq=False)
class Op(Post):
    """One post under way.

    Attributes:
        owner: the agent at the other end.
        num_taken: pieces that left the source.
        socket: their bytes, until they land.
    """

    number: int
    poster: str
    owner: str
    operation: Operation
    pieces: tuple[Piece, ...]
    notification: bytes
    num_descriptors: int
    num_bytes: int
    error: str = ""
    state: PostState = PostState.IN_PROGRESS
    num_taken: int = 0
    num_landed: int = 0
    socket: deque[bytes] = field(default_factory=deque)

    @property
    def source(self) -> str:
        return self.poster if self.operation is Operation.WRITE else self.owner

    @property
    def target(self) -> str:
        return self.owner if self.operation is Operation.WRITE else self.poster

    @property
    def all_taken(self) -> bool:
        return self.num_taken == len(self.pieces)

    @property
    def all_landed(self) -> bool:
        return self.num_landed == len(self.pieces)

    @property
    def notice(self) -> Notice:
        return Notice.unpack(self.notification)

    def touches(self, agent: str, group: int, slot: int) -> bool:
        """Whether it may still read or write this slot of this life."""
        start = slot * SLOT_BYTES
        reads = self.pieces[self.num_taken :] if agent == self.source else ()
        writes = self.pieces[self.num_landed :] if agent == self.target else ()
        return any(piece.group == group and start <= piece.source < start + SLOT_BYTES for piece in reads) or any(
            piece.group == group and start <= piece.target < start + SLOT_BYTES for piece in writes
        )

    def __str__(self) -> str:
        way = "->" if self.operation is Operation.WRITE else "<-"
        moved = f"{self.num_taken} taken, {self.num_landed} landed of {len(self.pieces)}"
        return f"post {self.number} {self.poster}{way}{self.owner} ({self.state.name}, {moved})"


class Arriving(NamedTuple):
    """A notification on its way."""

    target: str
    notification: Notification


class Unseen(NamedTuple):
    """Bytes that landed and cannot be read yet."""

    poster: str
    target: str
    group: int
    offset: int
    content: bytes


class Wire:
    """All posts and notifications of one world.

    Attributes:
        kind: "cma" or "tcp".
        lagging: what landed is read only once the notification was: as on lanes that write past the processor's caches.
        lets_go: a write can be released once all its bytes are in the socket, before they landed.
        unproven: transfers of which some post ended, for its poster, before it was known to be done.
        ops: posts that may still move bytes, or whose poster has not seen their end.
        inboxes: notifications that the agent's next progress reads.
    """

    def __init__(self, kind: str, *, lagging: bool = False, lets_go: bool = False) -> None:
        self.kind = kind
        self.lagging = lagging
        self.lets_go = lets_go
        self.unproven: set[TransferKey] = set()
        self.ops: list[Op] = []
        self.arriving: list[Arriving] = []
        self.inboxes: dict[str, deque[Notification]] = {}
        self.processes: dict[str, Process] = {}
        self._unseen: list[Unseen] = []
        self._next_op = 0

    def join(self, process: Process) -> None:
        self.processes[process.agent] = process
        self.inboxes[process.agent] = deque()

    def post(
        self, poster: str, owner: str, operation: Operation, pieces: tuple[Piece, ...], notification: bytes, runs: int
    ) -> Op:
        num_bytes = sum(piece.num_bytes for piece in pieces)
        op = Op(self._next_op, poster, owner, operation, pieces, notification, runs, num_bytes)
        self._next_op += 1
        self.ops.append(op)
        return op

    # ---- what can happen next

    def can_take(self, op: Op) -> bool:
        mover = op.source if self.kind == "tcp" else op.poster
        there = self._run(op.owner) is not Run.DEAD
        return not op.all_taken and there and self._run(mover) is Run.RUNNING and op.state is PostState.IN_PROGRESS

    def can_land(self, op: Op) -> bool:
        return bool(op.socket) and self._run(op.target) is Run.RUNNING

    def can_finish(self, op: Op) -> bool:
        return op.all_landed and op.state is PostState.IN_PROGRESS and self._run(op.poster) is Run.RUNNING

    def can_break(self, op: Op) -> bool:
        """The poster can find out that the other end is gone."""
        lost = self._run(op.owner) is Run.DEAD and not op.all_landed
        return lost and op.state is PostState.IN_PROGRESS and self._run(op.poster) is Run.RUNNING

    # ---- steps

    def take(self, op: Op) -> Piece:
        """Move the next piece out of the source: with cma into the target, with tcp into the socket."""
        piece = op.pieces[op.num_taken]
        content = self.processes[op.source].pool.storage.read(piece.group, piece.source, piece.num_bytes)
        op.num_taken += 1
        if self.kind == "tcp":
            op.socket.append(content)
        else:
            self._land(op, piece, content)
        return piece

    def land(self, op: Op) -> Piece:
        """Move the oldest piece in the socket into the target."""
        piece = op.pieces[op.num_landed]
        self._land(op, piece, op.socket.popleft())
        self._forget_if_over(op)
        return piece

    def finish(self, op: Op) -> None:
        """The poster sees that every piece is where it belongs, and the notification leaves."""
        op.state = PostState.DONE
        self.ops.remove(op)
        if self._run(op.owner) is not Run.DEAD:
            self.arriving.append(Arriving(op.owner, Notification(op.poster, op.notification)))

    def fail(self, op: Op, error: str) -> None:
        """The poster sees an error. What it wrote to a socket lands nevertheless; what it read is dropped."""
        op.state, op.error = PostState.FAILED, error
        self.unproven.add(op.notice.key)
        self._end(op)

    def arrive(self, arriving: Arriving) -> None:
        self.arriving.remove(arriving)
        self.inboxes[arriving.target].append(arriving.notification)

    def read_inbox(self, agent: str) -> list[Notification]:
        """All notifications that came; what landed before them can be read from now on."""
        inbox = self.inboxes[agent]
        found = list(inbox)
        inbox.clear()
        for notification in found:
            self._show(agent, notification.peer)
        return found

    def release(self, op: Op) -> bool:
        """Whether the poster's memory is touched no more."""
        if self.can_finish(op):
            self.finish(op)
        if op.state is not PostState.IN_PROGRESS:
            return True
        early = self.lets_go and op.operation is Operation.WRITE and op.all_taken
        if early:
            self.unproven.add(op.notice.key)
        return early

    def die(self, agent: str) -> None:
        """A process is gone, and its memory with it."""
        self.inboxes[agent].clear()
        self.arriving = [arriving for arriving in self.arriving if arriving.target != agent]
        self._unseen = [unseen for unseen in self._unseen if unseen.target != agent]
        for op in list(self.ops):
            if agent == op.poster:
                self._orphan(op)
            elif agent == op.target:
                op.socket.clear()
                self._forget_if_over(op)

    def _orphan(self, op: Op) -> None:
        op.state = PostState.FAILED
        if self.kind != "tcp":
            self._end(op)
        elif op.operation is Operation.WRITE:
            op.pieces = op.pieces[: op.num_taken]
            self._forget_if_over(op)

    def serve_orphan(self, op: Op) -> None:
        """The owner's progress comes to what a dead reader asked for: it reads a piece and sends it nowhere."""
        op.num_taken = min(op.num_taken + 1, len(op.pieces))
        if op.num_taken == len(op.pieces):
            self._end(op)

    def can_serve_orphan(self, op: Op) -> bool:
        reads = op.operation is Operation.READ and self._run(op.poster) is Run.DEAD
        return reads and self._run(op.owner) is Run.RUNNING

    # ---- what a god sees

    def touching(self, agent: str, group: int, slot: int) -> Op | None:
        """A post that may still read or write this slot."""
        return next((op for op in self.ops if op.touches(agent, group, slot)), None)

    def drained(self, peer: str, agent: str) -> bool:
        """Whether nothing of a dead peer is left in the sockets between the two, notifications included."""
        left = any({peer, agent} == {op.poster, op.owner} and op.poster == peer for op in self.ops)
        return not left and not any(
            arriving.target == agent and arriving.notification.peer == peer for arriving in self.arriving
        )

    def overwritten(self, agent: str, group: int, slot: int) -> None:
        """The owner of this slot writes it anew: what was not seen yet never will be."""
        self._unseen = [u for u in self._unseen if not (u.target == agent and u.group == group and _in(slot, u.offset))]

    def _land(self, op: Op, piece: Piece, content: bytes) -> None:
        op.num_landed += 1
        if self.lagging and op.operation is Operation.WRITE:
            self._unseen.append(Unseen(op.poster, op.target, piece.group, piece.target, content))
        else:
            self.processes[op.target].pool.storage.write(piece.group, piece.target, content)

    def _show(self, agent: str, poster: str) -> None:
        for unseen in self._unseen:
            if (unseen.target, unseen.poster) == (agent, poster):
                self.processes[agent].pool.storage.write(unseen.group, unseen.offset, unseen.content)
        self._unseen = [u for u in self._unseen if (u.target, u.poster) != (agent, poster)]

    def _end(self, op: Op) -> None:
        """Nothing more leaves the source; only what is in the socket towards another life's memory still lands."""
        if op.operation is Operation.WRITE and op.socket:
            op.pieces = op.pieces[: op.num_taken]
        else:
            op.socket.clear()
            op.pieces = op.pieces[: op.num_landed]
            self.ops.remove(op)

    def _forget_if_over(self, op: Op) -> None:
        dead_end = self._run(op.target) is Run.DEAD or not op.socket
        if op.state is not PostState.IN_PROGRESS and dead_end and op in self.ops:
            self.ops.remove(op)

    def _run(self, agent: str) -> Run:
        return self.processes[agent].run


def _in(slot: int, offset: int) -> bool:
    return slot * SLOT_BYTES <= offset < (slot + 1) * SLOT_BYTES
