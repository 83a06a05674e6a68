"""Every error kvferry raises. The branch of the tree says what the caller should do.

Each message says what was asked, what is in effect, which rule decided, and how to fix it; fields carry the numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class KVError(Exception):
    """Root of every error raised on purpose."""


class ConfigError(KVError, ValueError):
    """The input is wrong: fix it and try again."""


class CapacityError(KVError):
    """The pools cannot hold what was asked.

    Args:
        requested: slots asked for, per pool group.
        available: slots that could be given, per pool group.
        permanent: the pools could never hold it, however long the caller waits; otherwise retry after a release.
    """

    def __init__(
        self, message: str, *, requested: Sequence[int], available: Sequence[int], permanent: bool = False
    ) -> None:
        super().__init__(message)
        self.requested = tuple(requested)
        self.available = tuple(available)
        self.permanent = permanent


@dataclass(frozen=True)
class Incompatibility:
    """One difference that forbids pairing: the field, both values, and why it matters."""

    field: str
    local: str
    remote: str
    why: str

    def __str__(self) -> str:
        return f"{self.field}: local {self.local}, remote {self.remote} ({self.why})"


class IncompatiblePeer(KVError):
    """Do not pair with this peer: `reasons` lists every difference."""

    def __init__(self, peer: str, reasons: Sequence[Incompatibility]) -> None:
        super().__init__(f"cannot pair with {peer}: " + "; ".join(str(reason) for reason in reasons))
        self.peer = peer
        self.reasons = tuple(reasons)


class LocalProtocolError(KVError):
    """This side broke the protocol: our bug."""


class RemoteProtocolError(KVError):
    """The peer broke the protocol: drop it."""


class TransferError(KVError):
    """A transfer failed. `phase` is where: admission, prefill, grant, post, wire, result or decode."""

    def __init__(self, message: str, *, transfer_id: str, peer: str, phase: str) -> None:
        super().__init__(f"transfer {transfer_id} with {peer or 'no peer'} failed in phase {phase}: {message}")
        self.transfer_id = transfer_id
        self.peer = peer
        self.phase = phase
        self.reason = message


class TransferTimeout(TransferError):
    """The deadline of the transfer passed."""


class TransferCancelled(TransferError):
    """The transfer was cancelled on request of a client, the frontend or the other worker."""


class PeerLost(TransferError):
    """The connection to the other worker broke."""


class TransportError(KVError):
    """A transport library reported a failure; made only where that library is called."""

    def __init__(self, backend: str, status: str, message: str) -> None:
        super().__init__(f"{backend}: {message} (status {status})")
        self.backend = backend
        self.status = status
        self.reason = message


class ControlError(KVError):
    """A call on the control plane got no usable answer from `peer`, an endpoint or a worker."""

    def __init__(self, message: str, *, peer: str) -> None:
        super().__init__(f"{peer}: {message}" if peer else message)
        self.peer = peer
        self.reason = message


class Unavailable(ControlError):
    """The server cannot be reached, is shutting down, or went away during the call: try another, or later."""


class DeadlineExceeded(ControlError):
    """No answer came within the deadline of the call; what the server did with it is not known."""


class UnknownMember(KVError):
    """The directory does not know this member: its lease ran out or the directory restarted. Join again."""


class ComputeError(KVError):
    """The model could not compute this request, or computed nonsense. Other requests are not concerned."""


class InvariantError(KVError):
    """The books of a pool do not add up. `story` says which numbers disagree. Stop using the pool."""

    def __init__(self, story: str) -> None:
        super().__init__(story)
        self.story = story
