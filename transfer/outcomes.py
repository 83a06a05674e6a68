"""What the transport thread tells the engine's loop about its transfers."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.cache.errors import PeerLost, TransferCancelled, TransferError, TransferTimeout
from kvferry.transfer.types import AuxRecord, Failure, Message, Phase, Side, TransferKey, WireReport, WorkerId

SendMessage = Callable[[WorkerId, Message], bool]
"""Hand a message to the control plane. Never blocks; False: it was not and will not be sent."""


HangUp = Callable[[WorkerId, str], None]
"""Have the control plane close its channel with a peer, after what is queued on it. Never blocks."""


@dataclass(frozen=True)
class TransferOutcome:
    """An attempt ended on this side. `error` is None exactly when it succeeded; a receiver then has `aux`."""

    key: TransferKey
    side: Side
    error: TransferError | None
    wire: WireReport
    seconds: float
    aux: AuxRecord | None = None


@dataclass(frozen=True)
class PagesReusable:
    """The pages of an attempt may be used again: `session.may_reuse` said so."""

    key: TransferKey
    side: Side


@dataclass(frozen=True)
class PagesInDoubt:
    """The pages of an attempt are out of circulation until proof comes."""

    key: TransferKey
    side: Side


Report = TransferOutcome | PagesReusable | PagesInDoubt


class Outbox:
    """Reports on their way to the engine's loop; a few per attempt, so bounded by the attempts that are open.

    Concurrency: `put` from the transport thread, `drain` from the engine's.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._reports: deque[Report] = deque()
        self.wake = wake

    def put(self, report: Report) -> None:
        self._reports.append(report)
        self.wake()

    def drain(self) -> list[Report]:
        return [self._reports.popleft() for _ in range(len(self._reports))]


_KINDS = {
    "timeout": TransferTimeout,
    "lease_expired": TransferTimeout,
    "cancelled": TransferCancelled,
    "peer_lost": PeerLost,
}


def error_of(key: TransferKey, sender: str, receiver: str, peer: str, failure: Failure) -> TransferError:
    """The typed error for a failure record, naming both ends.

    Args:
        peer: the other end; empty while there is none.
    """
    ends = f" (from {sender or 'no sender'} to {receiver or 'no receiver yet'})"
    kind = _KINDS.get(failure.code, TransferError)
    return kind(f"{failure}{ends}", transfer_id=key.transfer_id, peer=peer, phase=failure.phase.value)


def cancelled(reason: str) -> Failure:
    """Somebody asked to stop."""
    return Failure("cancelled", Phase.WIRE, reason)
