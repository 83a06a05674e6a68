"""How many pages may be in doubt before a worker takes on nothing new."""

import math
from collections.abc import Sequence

from kvferry.cache.errors import CapacityError
from kvferry.cache.protocol import CacheManager


class QuarantineBound:
    """Quarantined pages come back on proof only; a worker that loses too many says so instead of filling up slowly.

    Args:
        limit: share of the slots of each pool group, above 0 and at most 1.
    """

    def __init__(self, manager: CacheManager, limit: float) -> None:
        self._limit = limit
        self._groups = tuple(
            ", ".join(str(manager.layout.life_cycles[index].life_cycle) for index in group.life_cycles)
            for group in manager.layout.pool_groups
        )
        self._num_slots = tuple(usage.num_slots for usage in manager.usage())

    def story(self, quarantined: Sequence[int]) -> str:
        """Why nothing new is admitted, naming the first pool group above the limit; empty when none is.

        Args:
            quarantined: slots per pool group.
        """
        for index, (lost, num_slots) in enumerate(zip(quarantined, self._num_slots, strict=True)):
            if lost > self._limit * num_slots:
                return (
                    f"pool group {index} ({self._groups[index]}) has {lost} of {num_slots} slots in quarantine, more "
                    f"than the {math.floor(self._limit * num_slots)} that transfer.quarantine_limit {self._limit:g} "
                    "allows: they come back once the workers that may still touch them say that they do not, or are "
                    "proven gone; restart those workers, or this one"
                )
        return ""

    def refusal(self, story: str) -> CapacityError:
        """The error of a request that arrives meanwhile: it may be tried again later."""
        return CapacityError(
            f"nothing new is admitted: {story}; or retry later",
            requested=(1,) * len(self._num_slots),
            available=(0,) * len(self._num_slots),
        )
