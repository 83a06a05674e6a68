"""The transport of a simulated worker: posts become steps of the world's wire."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.base import (
    DescriptorList,
    Descriptors,
    Indices,
    Notification,
    Operation,
    Post,
    PostState,
    Quiescence,
    Transport,
)
from tests.simulation.content import SLOT_BYTES
from tests.simulation.pool import place_of
from tests.simulation.wire import Op, Piece, Run, Wire

Prove = Callable[[str, str], Quiescence]
"""What is proven of a peer's agent to one of ours, both by name."""


class SimRuns(DescriptorList):
    """Runs of one life's memory.

    Attributes:
        peer: whose; None for our own.
    """

    def __init__(self, peer: str | None, rows: Descriptors) -> None:
        self.peer = peer
        self.rows = rows
        self.released = False

    def __len__(self) -> int:
        return len(self.rows)

    def release(self) -> None:
        self.released = True


class SimLane(Transport):
    """One agent. Addresses are simulated: `bases` tells where the memory of each agent starts."""

    name: ClassVar[str] = "simulated"

    def __init__(self, agent_name: str, wire: Wire, bases: dict[str, int], pieces_per_run: int, prove: Prove) -> None:
        self.agent_name = agent_name
        self._wire = wire
        self._bases = bases
        self._piece_bytes = SLOT_BYTES // pieces_per_run
        self._prove = prove
        self._peers: set[str] = set()

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Nothing to do: the wire reaches the pools of every process."""

    def metadata(self) -> bytes:
        return self.agent_name.encode()

    def connect(self, metadata: bytes) -> str:
        peer = metadata.decode()
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)

    def prepare(self, peer: str | None, descriptors: Descriptors) -> DescriptorList:
        if peer is not None and peer not in self._peers:
            raise self._error("UNKNOWN_PEER", f"{peer} is not connected")
        return SimRuns(peer, descriptors)

    def post(
        self,
        local: DescriptorList,
        local_indices: Indices,
        remote: DescriptorList,
        remote_indices: Indices,
        notification: bytes,
        operation: Operation = Operation.WRITE,
    ) -> Post:
        ours, theirs = self._held(local), self._held(remote)
        assert ours.peer is None
        assert theirs.peer is not None
        if theirs.peer not in self._peers:
            raise self._error("UNKNOWN_PEER", f"{theirs.peer} is not connected")
        if self._wire.kind == "tcp" and self._wire.processes[theirs.peer].run is Run.DEAD:
            raise self._error("DISCONNECTED", f"{theirs.peer} closed the connection")
        here = [place_of(self._bases[self.agent_name], int(ours.rows[index, 0])) for index in local_indices.tolist()]
        there = [place_of(self._bases[theirs.peer], int(theirs.rows[index, 0])) for index in remote_indices.tolist()]
        source, target = (here, there) if operation is Operation.WRITE else (there, here)
        pieces = tuple(
            Piece(group, start + offset, end + offset, self._piece_bytes)
            for (group, start), (other, end) in zip(source, target, strict=True)
            for offset in range(0, SLOT_BYTES, self._piece_bytes)
            if group == other
        )
        return self._wire.post(self.agent_name, theirs.peer, operation, pieces, notification, len(here))

    def poll(self, post: Post) -> PostState:
        return _op(post).state

    def release(self, post: Post) -> bool:
        return self._wire.release(_op(post))

    def notifications(self) -> list[Notification]:
        return self._wire.read_inbox(self.agent_name)

    def quiescence_proof(self, metadata: bytes) -> Quiescence:
        return self._prove(metadata.decode(), self.agent_name)

    def lane(self, peer: str) -> str:
        if peer not in self._peers:
            raise self._error("UNKNOWN_PEER", f"{peer} is not connected")
        return self._wire.kind

    def close(self) -> None:
        self._peers.clear()

    def _held(self, runs: DescriptorList) -> SimRuns:
        if isinstance(runs, SimRuns) and not runs.released:
            return runs
        raise self._error("RELEASED", "the list was released, or belongs to another agent")

    def _error(self, status: str, message: str) -> TransportError:
        return TransportError(self.name, status, message)


def _op(post: Post) -> Op:
    assert isinstance(post, Op)
    return post
