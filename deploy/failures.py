"""What the worker at the other end is told when a request ends here without success."""

from kvferry.cache.errors import (
    CapacityError,
    ComputeError,
    ConfigError,
    DeadlineExceeded,
    KVError,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
    Unavailable,
)
from kvferry.deploy.requests import Request
from kvferry.transfer.types import Failure, Phase

_CODES: tuple[tuple[type[KVError], str, str], ...] = (
    (TransferCancelled, "cancelled", ""),
    (TransferTimeout, "timeout", ""),
    (DeadlineExceeded, "timeout", "give the request more time"),
    (CapacityError, "no_room", "retry later, or give that worker larger pools"),
    (ComputeError, "compute_failed", "look into that worker's log"),
    (ConfigError, "bad_request", "mend the request"),
    (PeerLost, "peer_lost", ""),
    (Unavailable, "peer_lost", ""),
)
"""Class of the error, code, hint; the first that fits."""


def failure_of(request: Request, error: KVError | None) -> Failure:
    """The record of an error that ended a request; None: it ended without being asked for what it has."""
    if error is None:
        return Failure("cancelled", _phase(request), "the request ended before its pages were needed")
    for kind, code, hint in _CODES:
        if isinstance(error, kind):
            return Failure(code, _phase(request), str(error), hint)
    return Failure("failed", _phase(request), str(error))


def _phase(request: Request) -> Phase:
    if request.sequence is None:
        return Phase.ADMISSION
    return Phase.PREFILL if request.decode is None else Phase.DECODE
