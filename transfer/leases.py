"""Renewals: both sides of every attempt tell the other, in batches, that they stand by it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from kvferry.transfer.types import MAX_RENEWED, Renewal, Side, TransferKey, WorkerId

RENEWALS_PER_LEASE = 3


class Leases:
    """Says when to renew, and makes the messages. A lease is a duration: no clock reading ever crosses the wire.

    Args:
        lease_seconds: how long the other side may count on a renewal.
    """

    def __init__(self, worker: WorkerId, lease_seconds: float) -> None:
        self._worker = worker
        self.seconds = lease_seconds
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Whether it is time to renew. True once per interval."""
        if now < self._next:
            return False
        self._next = now + self.seconds / RENEWALS_PER_LEASE
        return True

    def renewal(self, side: Side, key: TransferKey) -> Renewal:
        """For one attempt, at once."""
        return Renewal(self._worker, side, (key,), self.seconds)

    def renewals(
        self, side: Side, attempts: Iterable[tuple[WorkerId, TransferKey]]
    ) -> Iterator[tuple[WorkerId, Renewal]]:
        """One message per peer, or more where it would name too many attempts."""
        keys: defaultdict[WorkerId, list[TransferKey]] = defaultdict(list)
        for peer, key in attempts:
            keys[peer].append(key)
        for peer, named in keys.items():
            for start in range(0, len(named), MAX_RENEWED):
                part = tuple(named[start : start + MAX_RENEWED])
                yield peer, Renewal(self._worker, side, part, self.seconds)
