"""Back-pressure of one direction of transfers: how many bytes and how many requests may be under way at one time."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from kvferry.cache.errors import LocalProtocolError

STALE_SECONDS = 30.0


class _Active(NamedTuple):
    num_bytes: int
    entered_at: float


class TransferBudget:
    """What the transfers of one direction may take together, first come, first served.

    A request that alone is larger than the budget enters when nothing else is active: it would wait for ever otherwise.

    Args:
        max_bytes: 0 for no limit.
        max_requests: 0 for no limit.
        stale_seconds: an active transfer older than this counts no more, so that one that is stuck does not keep out
            everybody else; None: each counts until it leaves.

    Source: transceiver specification 1.13.
    """

    def __init__(self, max_bytes: int, max_requests: int, stale_seconds: float | None = STALE_SECONDS) -> None:
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self._stale_seconds = stale_seconds
        self._active: dict[Hashable, _Active] = {}

    def __len__(self) -> int:
        """Transfers that entered and have not left, stale or not."""
        return len(self._active)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._active

    def num_admissible(self, line: Iterable[int], now: float) -> int:
        """How many from the head of a line may enter now. Whoever does not fit also keeps out those behind it.

        Args:
            line: bytes that each needs, in order of arrival; read no further than to the first that does not fit.
            now: in seconds, on the clock of `enter`.
        """
        counted = [active.num_bytes for active in self._active.values() if not self._is_stale(active, now)]
        used, num_active, admitted = sum(counted), len(counted), 0
        for num_bytes in line:
            if not self._fits(num_bytes, used, num_active):
                break
            used, num_active, admitted = used + num_bytes, num_active + 1, admitted + 1
        return admitted

    def enter(self, key: Hashable, num_bytes: int, now: float) -> None:
        """A transfer begins. Raises LocalProtocolError when it is active already."""
        if key in self._active:
            raise LocalProtocolError(f"transfer {key} has entered the budget already")
        self._active[key] = _Active(num_bytes, now)

    def leave(self, key: Hashable) -> None:
        """A transfer is over; one that is not active changes nothing."""
        self._active.pop(key, None)

    def _is_stale(self, active: _Active, now: float) -> bool:
        return self._stale_seconds is not None and now - active.entered_at > self._stale_seconds

    def _fits(self, num_bytes: int, used: int, num_active: int) -> bool:
        if num_active == 0:
            return True
        few = self._max_requests == 0 or num_active < self._max_requests
        return few and (self._max_bytes == 0 or used + num_bytes <= self._max_bytes)
