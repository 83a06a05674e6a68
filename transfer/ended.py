"""Attempts that are over here, or were stopped before they began: a bounded memory."""

from kvferry.transfer.types import Failure, TransferKey

MAX_REMEMBERED = 4096

SERVED = "already_served"
"""The code of an attempt that went well: opened again, it fails with this."""

KEY_HINT = "ask for a new prefill: a key serves one attempt"
LEASE_HINT = "the other side stopped renewing: look whether it runs, or raise transfer.lease_seconds"
BROKEN_HINT = "the connection is made anew; look into both workers' logs if it happens again"


class EndedAttempts:
    """The latest attempts that must not be opened here again, and why.

    The oldest is forgotten when there are too many. Nothing unsafe follows: what comes late for it is refused for other
    reasons, only later and with a less exact answer.
    """

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._reasons: dict[TransferKey, Failure] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def remember(self, key: TransferKey, failure: Failure) -> None:
        """The first reason stays."""
        self._reasons.setdefault(key, failure)
        if len(self._reasons) > self._limit:
            del self._reasons[next(iter(self._reasons))]

    def find(self, key: TransferKey) -> Failure | None:
        return self._reasons.get(key)
