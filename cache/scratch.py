"""Scratch pages: what layers of a window share for prompt blocks that leave it within one chunk.

Only one layer runs at a time, so such a block needs the bytes of one layer, not of all: a scratch slot serves as many
blocks as it has sub-pages. Source: pools specification 3.8.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvferry.cache.block_tables import BlockTables, Parked, Rows, TableChange
from kvferry.cache.errors import ConfigError
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.layout import CacheLayout
from kvferry.cache.lifecycle import BlockRange, Counts, ceil_div
from kvferry.cache.page_table import SlotList
from kvferry.cache.sizing import Steps, scratch_counts
from kvferry.cache.slots import SlotAllocator

_NO_SLOTS = np.empty(0, np.int32)

ScratchChanges = dict[tuple[int, LifeCycleId], tuple[SlotList, int]]
"""By row and life cycle: scratch slots to give back, and how many to take."""


class ScratchPages:
    """The scratch slots of every active sequence.

    Attributes:
        slots: by row and life cycle; nothing where there are none. Shapes: [n] each.
    """

    def __init__(
        self,
        layout: CacheLayout,
        tables: BlockTables,
        allocators: Sequence[SlotAllocator],
        *,
        enabled: bool,
        max_rewind_tokens: int,
    ) -> None:
        self.slots: dict[tuple[int, LifeCycleId], SlotList] = {}
        self.enabled = enabled
        self._layout = layout
        self._tables = tables
        self._allocators = allocators
        self._max_rewind_tokens = max_rewind_tokens

    def of(self, row: int, life_cycle: LifeCycleId) -> SlotList:
        """Scratch slots of one sequence. Shapes: [n]."""
        return self.slots.get((row, life_cycle), _NO_SLOTS)

    def blocks(self, row: int, life_cycle: LifeCycleId) -> BlockRange:
        """Blocks of one sequence that use scratch pages."""
        history, capacity = int(self._tables.history[row]), int(self._tables.capacity[row])
        return self._range(life_cycle, history, capacity) if self.enabled else BlockRange(0, 0)

    def needed(self, parked: Parked) -> dict[LifeCycleId, int]:
        """Scratch slots that a sequence needs to become active; life cycles that need none are left out."""
        if not self.enabled:
            return {}
        counts = {
            group.id: ceil_div(len(self._range(group.id, parked.history, parked.capacity)), group.sub_pages)
            for group in self._layout.life_cycles
        }
        return {life_cycle: count for life_cycle, count in counts.items() if count}

    def take(self, row: int, counts: dict[LifeCycleId, int]) -> None:
        """Take slots for a sequence that became active; they are free."""
        for life_cycle, count in counts.items():
            self.slots[row, life_cycle] = self._allocator(life_cycle).acquire(count)

    def give_up(self, row: int) -> None:
        """Give all slots of a sequence back."""
        for group in self._layout.life_cycles:
            self._allocator(group.id).drop_user(self.slots.pop((row, group.id), _NO_SLOTS))

    def changes(self, change: TableChange) -> ScratchChanges:
        """What a change of the tables asks of the scratch slots."""
        found: ScratchChanges = {}
        for position in np.flatnonzero(self._tables.uses_scratch[change.rows]).tolist():
            row = int(change.rows[position])
            for group, part in zip(self._layout.life_cycles, change.life_cycles, strict=True):
                have = self.of(row, group.id)
                want = 0 if part.scratch is None else int(part.scratch[position])
                if want != len(have):
                    found[row, group.id] = (have[want:], max(0, want - len(have)))
        return found

    def apply(self, changes: ScratchChanges) -> None:
        """Forget the slots that were given back and take new ones; they are free."""
        for (row, life_cycle), (less, more) in changes.items():
            have = self.slots.pop((row, life_cycle), _NO_SLOTS)
            have = np.concatenate([have[: len(have) - len(less)], self._allocator(life_cycle).acquire(more)])
            if len(have):
                self.slots[row, life_cycle] = have

    def check_cursors(self, rows: Rows, history: Counts, capacity: Counts, name: Callable[[int], str]) -> None:
        """Raise ConfigError unless the cursors may move there.

        Blocks on scratch pages must be out of the window at once: their bytes are those of the last layer. And what was
        computed into pages must be history before the blocks after it, or around it, go on scratch pages.

        Args:
            name: says whose row it is.
        """
        using = np.isin(rows, [row for row, _ in self.slots])
        old_history, old_capacity = self._tables.history[rows], self._tables.capacity[rows]
        lowest = old_capacity - self._max_rewind_tokens
        moved = (history != old_history) | (capacity != old_capacity)
        wrong = (history < lowest) | (using & ((history > old_capacity) | (capacity < old_capacity)))
        for index in np.flatnonzero(moved & wrong & (using | self._will_use(history, capacity))).tolist():
            raise ConfigError(
                f"{name(rows[index])} has or needs scratch pages: history {int(history[index])} must reach at least "
                f"{int(lowest[index])} and at most {int(old_capacity[index])}, and capacity {int(capacity[index])} "
                "must not shrink while it has them"
            )

    def _will_use(self, history: Counts, capacity: Counts) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether sequences with these cursors use scratch pages. Shapes: all alike."""
        used = np.zeros(len(history), np.bool_)
        for group in self._layout.life_cycles:
            steps = Steps(history, capacity)
            used |= scratch_counts(group.life_cycle, steps, self._layout.tokens_per_block, self._max_rewind_tokens) > 0
        return used

    def _range(self, life_cycle: LifeCycleId, history: int, capacity: int) -> BlockRange:
        rule = self._layout.life_cycles[life_cycle].life_cycle
        return rule.scratch_range(history, capacity, self._layout.tokens_per_block, self._max_rewind_tokens)

    def _allocator(self, life_cycle: LifeCycleId) -> SlotAllocator:
        return self._allocators[self._layout.life_cycles[life_cycle].pool_group]
