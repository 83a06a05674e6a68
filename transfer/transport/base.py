"""The contract between kvferry and a transport library.

One transport object is one agent: it registers memory, connects to remote agents and writes registered memory of its
own into registered memory of a peer. `tests/transport_contract/` holds every implementation to what is said here.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

Descriptors = npt.NDArray[np.uint64]
"""Memory runs. Shapes: [n, 3], columns address, length in bytes, device index."""

Indices = npt.NDArray[np.int32]
"""Positions in a prepared descriptor list. Shapes: [n]."""

MAX_NOTIFICATION_BYTES = 4096
"""Longest notification a write may carry."""


class PostState(enum.Enum):
    """Where a posted write stands."""

    IN_PROGRESS = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Operation(enum.Enum):
    """Which way the bytes of a post go."""

    WRITE = "WRITE"
    """From our memory to the peer's."""
    READ = "READ"
    """From the peer's memory to ours."""


@dataclass(frozen=True)
class Quiescence:
    """Whether something a peer started may still touch our memory.

    Attributes:
        proven: it may not, ever.
        story: what the proof is, or what is missing for one.
    """

    proven: bool
    story: str


@dataclass(frozen=True)
class Notification:
    """Bytes a peer attached to a post. Once this is read, all it wrote is visible here, or all it read was read."""

    peer: str
    payload: bytes


class DescriptorList(ABC):
    """Memory runs validated once and addressed by index afterwards. `release()` is idempotent."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def release(self) -> None: ...


class Post(ABC):
    """One write or read handed to the library.

    Attributes:
        num_descriptors: runs the library really moves, after it merged neighbours.
        num_bytes: payload.
        error: why it failed; empty while it did not.
    """

    num_descriptors: int
    num_bytes: int
    error: str


class Transport(ABC):
    """One agent of one transport library.

    Concurrency: every method is called from the one thread that owns the transport, except `close()`, which is called
    after that thread ended. Nothing here blocks on a peer, except that `post` may copy the whole payload before it
    returns (shared-memory lanes), so callers post bounded slices.

    Raises: TransportError from every method, and no other error of the library below.
    """

    name: ClassVar[str]
    """The name users write in their configuration."""

    agent_name: str
    """The name peers know this agent by; unique per process life."""

    @abstractmethod
    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Make memory readable and writable by the transport; peers may write to it as soon as they have the metadata.

        Shapes: each region is 1-D, uint8, contiguous; all of one call live on one device.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer passes to `connect`. Made after all registrations; opaque to everyone else."""

    @abstractmethod
    def connect(self, metadata: bytes) -> str:
        """Load a peer's metadata and start wiring lanes to it. Returns the peer's agent name.

        Returns before the wire is up. Connecting to a known peer again with the same metadata changes nothing.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer. Unknown peers are ignored. Lists prepared for it must be released first."""

    @abstractmethod
    def prepare(self, peer: str | None, descriptors: Descriptors) -> DescriptorList:
        """Validate runs of a connected peer's memory, or of our own when `peer` is None.

        Raises: TransportError when a run is not inside registered memory.
        """

    @abstractmethod
    def post(
        self,
        local: DescriptorList,
        local_indices: Indices,
        remote: DescriptorList,
        remote_indices: Indices,
        notification: bytes,
        operation: Operation = Operation.WRITE,
    ) -> Post:
        """Start moving run i to run i for each pair of indices, then notify the peer.

        Lengths of paired runs are equal. The source bytes must not change before the post is terminal.

        Raises: TransportError when nothing was handed to the library, so nothing was or will be moved.
        """

    @abstractmethod
    def poll(self, post: Post) -> PostState:
        """Progress and report a post, also one that was released.

        DONE: source memory is no longer read and the bytes are where they belong.

        FAILED proves nothing about the bytes: some may have landed, more may follow.
        """

    @abstractmethod
    def release(self, post: Post) -> bool:
        """Give up the handle of a post. True: the library let go of it and touches our memory no more.

        False: it is under way and cannot be aborted (NIXL says it can, and goes on reading); the handle is kept and
        `release` may be tried again.
        """

    @abstractmethod
    def notifications(self) -> list[Notification]:
        """Progress the agent and return what arrived since the last call, in order per peer. Never blocks."""

    @abstractmethod
    def quiescence_proof(self, metadata: bytes) -> Quiescence:
        """Whether nothing that this life of a peer started, writes or reads, can still touch our memory.

        Asked after the peer stopped answering; it need not be connected any more. What counts as proof depends on the
        lane. A timer, an error status and deregistered memory never do. Never blocks; progresses nothing.

        Args:
            metadata: what `connect` was given for it.
        """

    @abstractmethod
    def lane(self, peer: str) -> str:
        """What the wire to this peer really is (rdma, cuda_ipc, cma, shm, tcp, memcpy), or "unknown" before a write."""

    @abstractmethod
    def close(self) -> None:
        """Deregister memory, then destroy the agent. Idempotent."""
