"""Slots promised to open sequences, and what is left for those without a promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvferry.cache.block_tables import Rows, TableChange, by_pool_group
from kvferry.cache.errors import CapacityError
from kvferry.cache.layout import CacheLayout
from kvferry.cache.lifecycle import Counts
from kvferry.cache.page_table import SlotList
from kvferry.cache.scratch import ScratchChanges
from kvferry.cache.slots import SlotAllocator

if TYPE_CHECKING:
    from kvferry.cache.sequence import SequenceCache


class Promises:
    """Reservations of one manager's sequences.

    A sequence with a reservation may count on its slots; one without takes only what nobody is promised.

    Attributes:
        total: promised slots per pool group, taken yet or not.
    """

    def __init__(self, layout: CacheLayout, allocators: Sequence[SlotAllocator]) -> None:
        self.total: Counts = np.zeros(len(layout.pool_groups), np.int64)
        self._layout = layout
        self._allocators = allocators
        self._without_promise: dict[SequenceCache, None] = {}

    def add(self, sequence: SequenceCache) -> None:
        """A sequence opens."""
        if sequence.reserved is None:
            self._without_promise[sequence] = None
        else:
            self.total += sequence.reserved

    def remove(self, sequence: SequenceCache) -> None:
        """A sequence closes."""
        if sequence.reserved is None:
            del self._without_promise[sequence]
        else:
            self.total -= sequence.reserved

    def left(self) -> tuple[int, ...]:
        """Slots per pool group that are neither promised, nor taken without a promise, nor kept by transfers.

        Transfers keep what they read, and what they write for a sequence that is gone (`SlotAllocator.num_kept`). Pages
        that are promised and read count twice, so the number may be below 0.
        """
        spoken_for = self.total + sum(
            (self._taken(sequence) for sequence in self._without_promise), np.zeros_like(self.total)
        )
        return tuple(
            allocator.num_slots - int(count) - allocator.num_kept
            for allocator, count in zip(self._allocators, spoken_for, strict=True)
        )

    def may_claim(self, slots: Sequence[SlotList]) -> bool:
        """Whether a sequence without a promise may become a user of these slots. Shapes: slots[life cycle] is [n]."""
        if not self.total.any():
            return True
        groups = by_pool_group(self._layout, slots)
        return all(len(ids) <= left for ids, left in zip(groups, self.left(), strict=True) if len(ids))

    def require(self, who: str, need: Sequence[int]) -> None:
        """Raise CapacityError when a sequence without a promise needs slots that are promised to others."""
        if not self.total.any() or not any(need):
            return
        left = self.left()
        if any(count > rest for count, rest in zip(need, left, strict=True) if count):
            raise CapacityError(
                f"{who} needs {list(need)} new slots per pool group and has no reservation; {list(left)} are not "
                "promised to others: retry after a release, or reserve",
                requested=need,
                available=left,
            )

    def need_of(
        self, change: TableChange, scratch: ScratchChanges, promised: np.ndarray[tuple[int], np.dtype[np.bool_]]
    ) -> list[int]:
        """Slots per pool group that rows without a promise gain by a change, less those they give up.

        Args:
            promised: by row of the tables.
        """
        need = [0] * len(self._layout.pool_groups)
        for group, part in zip(self._layout.life_cycles, change.life_cycles, strict=True):
            taken, dropped = _rows_without(part.taken.rows, promised), _rows_without(part.dropped.rows, promised)
            need[group.pool_group] += taken - dropped
        for (row, life_cycle), (less, more) in scratch.items():
            if not promised[row]:
                need[self._layout.life_cycles[life_cycle].pool_group] += more - len(less)
        return [max(0, count) for count in need]

    def _taken(self, sequence: SequenceCache) -> Counts:
        """Slots per pool group of one sequence; shared ones count for each of their users."""
        taken = np.zeros_like(self.total)
        for group in self._layout.life_cycles:
            taken[group.pool_group] += sequence.num_pages(group.id)
        return taken


def _rows_without(rows: Rows, promised: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    return int(np.count_nonzero(~promised[rows])) if len(rows) else 0
