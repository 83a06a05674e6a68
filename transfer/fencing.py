"""Is what was said about these pages said about this life of theirs? Each question has one place."""

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.types import Grant, WorkerId


def check_life(incarnation: int, worker: WorkerId) -> None:
    """Raise RemoteProtocolError unless it is for this life of this worker."""
    if incarnation != worker.incarnation:
        raise RemoteProtocolError(f"it is for incarnation {incarnation:x} of this worker, this is {worker}")


def check_ends(sender: WorkerId, receiver: WorkerId, peer: WorkerId, worker: WorkerId) -> None:
    """Raise RemoteProtocolError unless `peer` speaks as the sender, to this life of this worker as the receiver."""
    check_life(receiver.incarnation, worker)
    if (sender, receiver.name) != (peer, worker.name):
        raise RemoteProtocolError(f"{peer} speaks of a transfer from {sender} to {receiver}, to {worker}")


def check_fence(fence: int, grant: Grant) -> None:
    """Raise RemoteProtocolError unless it is about this grant: these slots in this life of theirs."""
    if fence != grant.fence:
        raise RemoteProtocolError(
            f"it is about other slots, or another life of them, than transfer {grant.key} has now: "
            f"fence {fence:016x}, granted was {grant.fence:016x}"
        )


def is_about(fence: int, grant: Grant | None) -> bool:
    """Whether a last word is about this grant; before one was sent there is nothing to be wrong about."""
    try:
        if grant is not None:
            check_fence(fence, grant)
    except RemoteProtocolError:
        return False
    return True
