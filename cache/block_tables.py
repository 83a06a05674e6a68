"""Cursors and block tables of all active sequences, as arrays: one row each, changed for many rows at once.

A change is planned first, as the cells of the tables that need a page and the cells that give theirs up, and applied
only when the slots are known.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.ids import NO_SLOT, LifeCycleId
from kvferry.cache.layout import CacheLayout, LifeCycleLayout
from kvferry.cache.lifecycle import Counts
from kvferry.cache.page_table import SlotList

Rows = npt.NDArray[np.int64]
_FIRST_ROWS = 16
_FIRST_BLOCKS = 16


class Cells(NamedTuple):
    """Places in a block table. Shapes: [n] each."""

    rows: Rows
    ordinals: Counts

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, chosen: npt.NDArray[np.bool_]) -> "Cells":
        return Cells(self.rows[chosen], self.ordinals[chosen])


class LifeCycleChange(NamedTuple):
    """What one life cycle gains and loses.

    Attributes:
        taken: cells that need a new page.
        dropped: cells whose page is given up.
        moved: recurrent states that go from one cell to another, by row: (from, to).
        scratch: scratch slots that each row has after the change, None when no row uses any. Shapes: [len(rows)].
    """

    taken: Cells
    dropped: Cells
    moved: tuple[Cells, Cells]
    scratch: Counts | None


class TableChange(NamedTuple):
    """New cursors of some rows and what follows for every life cycle."""

    rows: Rows
    history: Counts
    capacity: Counts
    life_cycles: tuple[LifeCycleChange, ...]


class Parked(NamedTuple):
    """A row taken out of the tables. Shapes: tables[life cycle] is [num_blocks]."""

    committed: int
    history: int
    capacity: int
    tables: tuple[SlotList, ...]


_NO_CELLS = Cells(np.empty(0, np.int64), np.empty(0, np.int64))


class BlockTables:
    """Rows of active sequences.

    Shapes: committed, history, capacity are [num_rows], in tokens; tables[life cycle] is [num_rows, width] of slot ids.
    """

    def __init__(self, life_cycles: Sequence[LifeCycleLayout], tokens_per_block: int, max_rewind_tokens: int) -> None:
        self._life_cycles = tuple(life_cycles)
        self._tokens_per_block = tokens_per_block
        self._max_rewind_tokens = max_rewind_tokens
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))
        self.committed = np.zeros(_FIRST_ROWS, np.int64)
        self.history = np.zeros(_FIRST_ROWS, np.int64)
        self.capacity = np.zeros(_FIRST_ROWS, np.int64)
        self.active = np.zeros(_FIRST_ROWS, np.bool_)
        self.uses_scratch = np.zeros(_FIRST_ROWS, np.bool_)
        self.promised = np.zeros(_FIRST_ROWS, np.bool_)
        self.tables = [np.full((_FIRST_ROWS, _FIRST_BLOCKS), NO_SLOT, np.int32) for _ in life_cycles]

    # ---- rows

    def open_row(self, parked: Parked, *, uses_scratch: bool, promised: bool) -> int:
        """Take a row for a sequence, with these cursors and pages."""
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        self.committed[row], self.history[row], self.capacity[row] = parked[:3]
        self.active[row], self.uses_scratch[row], self.promised[row] = True, uses_scratch, promised
        self._widen(max((len(table) for table in parked.tables), default=0))
        for table, slots in zip(self.tables, parked.tables, strict=True):
            table[row, : len(slots)] = slots
        return row

    def close_row(self, row: int) -> Parked:
        """Give a row back; the result is what it held."""
        parked = Parked(
            int(self.committed[row]),
            int(self.history[row]),
            int(self.capacity[row]),
            tuple(self.row(index, row).copy() for index in range(len(self.tables))),
        )
        for table in self.tables:
            table[row] = NO_SLOT
        self.active[row] = self.uses_scratch[row] = False
        self._free_rows.append(row)
        return parked

    def row(self, life_cycle: int, row: int) -> SlotList:
        """Slots of one row, a view. Shapes: [num_blocks]."""
        return self.tables[life_cycle][row, : self.num_blocks(row)]

    def num_blocks(self, row: int) -> int:
        return -(-int(self.capacity[row]) // self._tokens_per_block)

    # ---- changes

    def stays(self, row: int, history: int, capacity: int) -> bool:
        """Whether moving the cursors of an active row, without scratch pages, needs no page and gives none up."""
        p = self._tokens_per_block
        if -(-capacity // p) != self.num_blocks(row):
            return False
        before = int(self.history[row])
        return all(
            group.life_cycle.stale_range(before, p).end == group.life_cycle.stale_range(history, p).end
            for group in self._life_cycles
        )

    def plan(self, rows: Rows, history: Counts, capacity: Counts) -> TableChange:
        """What moving the cursors of these rows takes and gives. Nothing changes. Shapes: [n] each, rows distinct."""
        old_blocks = -(-self.capacity[rows] // self._tokens_per_block)
        new_blocks = -(-capacity // self._tokens_per_block)
        changes = [
            self._plan_recurrent(index, rows, history, old_blocks, new_blocks)
            if group.life_cycle.recurrent
            else self._plan_attention(index, rows, history, old_blocks, new_blocks, capacity)
            for index, group in enumerate(self._life_cycles)
        ]
        return TableChange(rows, history, capacity, tuple(changes))

    def dropped_slots(self, change: TableChange, life_cycle: int) -> SlotList:
        """Slots that a change gives up. Shapes: [n]."""
        rows, ordinals = change.life_cycles[life_cycle].dropped
        return self.tables[life_cycle][rows, ordinals]

    def apply(self, change: TableChange, slots: Sequence[SlotList]) -> None:
        """Put the new slots of every life cycle into its taken cells, blank the dropped ones and set the cursors."""
        self._widen(int(np.max(-(-change.capacity // self._tokens_per_block), initial=0)))
        for table, part, taken in zip(self.tables, change.life_cycles, slots, strict=True):
            table[part.dropped.rows, part.dropped.ordinals] = NO_SLOT
            source, target = part.moved
            if len(source):
                states = table[source.rows, source.ordinals]
                table[source.rows, source.ordinals] = NO_SLOT
                table[target.rows, target.ordinals] = states
            table[part.taken.rows, part.taken.ordinals] = taken
        self.history[change.rows] = change.history
        self.capacity[change.rows] = change.capacity

    # ---- private

    def _plan_attention(
        self, index: int, rows: Rows, history: Counts, old_blocks: Counts, new_blocks: Counts, capacity: Counts
    ) -> LifeCycleChange:
        life_cycle, p = self._life_cycles[index].life_cycle, self._tokens_per_block
        if life_cycle.full:
            return _unmoved(_cells(rows, old_blocks, new_blocks), _cells(rows, new_blocks, old_blocks))
        old_end = life_cycle.stale_bounds(self.history[rows], p)[1]
        start, end = life_cycle.stale_bounds(history, p)
        uses_scratch = self.uses_scratch[rows]
        touched = (old_blocks != new_blocks) | (end > old_end) | uses_scratch
        if not touched.any():
            return _unmoved(_NO_CELLS, _NO_CELLS)
        if not touched.all():
            rows, history, capacity = rows[touched], history[touched], capacity[touched]
            old_blocks, new_blocks = old_blocks[touched], new_blocks[touched]
            start, end, old_end = start[touched], end[touched], old_end[touched]
        dropped = _joined(
            _cells(rows, np.maximum(start, old_end), np.minimum(end, old_blocks)),
            _cells(rows, np.maximum(new_blocks, end), old_blocks),
        )
        if len(dropped):
            dropped = dropped.where(self.tables[index][dropped.rows, dropped.ordinals] >= 0)
        taken = _joined(
            _cells(rows, old_blocks, np.minimum(new_blocks, start)),
            _cells(rows, np.maximum(old_blocks, end), new_blocks),
        )
        if not uses_scratch.any():
            return _unmoved(taken, dropped)
        taken, lost, counts = self._without_scratch(index, taken, rows, history, capacity)
        scratch = np.zeros(len(touched), np.int64)
        scratch[touched] = counts
        return LifeCycleChange(taken, _joined(dropped, lost), (_NO_CELLS, _NO_CELLS), scratch)

    def _without_scratch(
        self, index: int, taken: Cells, rows: Rows, history: Counts, capacity: Counts
    ) -> tuple[Cells, Cells, Counts]:
        """The taken cells that need a page of their own, and the scratch slots of each row for the others.

        In between: cells whose pages are given up, since they hold only tokens that may be rewound and are computed
        again, on scratch pages.
        """
        group, counts, lost = self._life_cycles[index], np.zeros(len(rows), np.int64), _NO_CELLS
        for position in np.flatnonzero(self.uses_scratch[rows]):
            first, last = group.life_cycle.scratch_range(
                int(history[position]), int(capacity[position]), self._tokens_per_block, self._max_rewind_tokens
            )
            inside = (taken.rows == rows[position]) & (taken.ordinals >= first) & (taken.ordinals < last)
            taken = taken.where(~inside)
            blocks = np.arange(first, min(last, self.tables[index].shape[1]))
            blocks = blocks[self.tables[index][rows[position], blocks] >= 0]
            lost = _joined(lost, Cells(np.full(len(blocks), rows[position]), blocks))
            counts[position] = -(-(last - first) // group.sub_pages)
        return taken, lost, counts

    def _plan_recurrent(
        self, index: int, rows: Rows, history: Counts, old_blocks: Counts, new_blocks: Counts
    ) -> LifeCycleChange:
        """One page a row, which stands at the block that holds token history - 1."""
        life_cycle, p = self._life_cycles[index].life_cycle, self._tokens_per_block
        old_place = life_cycle.stale_bounds(self.history[rows], p)[1]
        new_place = life_cycle.stale_bounds(history, p)[1]
        had, has = old_blocks > 0, new_blocks > 0
        stays = had & has & (old_place != new_place)
        return LifeCycleChange(
            Cells(rows, new_place).where(has & ~had),
            Cells(rows, old_place).where(had & ~has),
            (Cells(rows, old_place).where(stays), Cells(rows, new_place).where(stays)),
            None,
        )

    def _add_rows(self) -> None:
        num_rows = len(self.active)
        for name in ("committed", "history", "capacity", "active", "uses_scratch", "promised"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.tables = [np.concatenate([table, np.full_like(table, NO_SLOT)]) for table in self.tables]
        self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))

    def _widen(self, num_blocks: int) -> None:
        width = self.tables[0].shape[1]
        if num_blocks <= width:
            return
        wider = max(num_blocks, 2 * width)
        for index, table in enumerate(self.tables):
            self.tables[index] = np.full((len(table), wider), NO_SLOT, np.int32)
            self.tables[index][:, :width] = table


def by_pool_group(
    layout: CacheLayout, slots: Sequence[SlotList], more: Sequence[tuple[LifeCycleId, SlotList]] = ()
) -> tuple[SlotList, ...]:
    """Slots per pool group, from slots per life cycle and some more."""
    parts: list[list[SlotList]] = [[np.empty(0, np.int32)] for _ in layout.pool_groups]
    for group, ids in zip(layout.life_cycles, slots, strict=True):
        parts[group.pool_group].append(ids)
    for life_cycle, ids in more:
        parts[layout.life_cycles[life_cycle].pool_group].append(ids)
    return tuple(np.concatenate(part) for part in parts)


def _unmoved(taken: Cells, dropped: Cells) -> LifeCycleChange:
    return LifeCycleChange(taken, dropped, (_NO_CELLS, _NO_CELLS), None)


def _cells(rows: Rows, starts: Counts, ends: Counts) -> Cells:
    """Every ordinal in [start, end) of each row; nothing where end <= start."""
    if len(rows) == 1:
        ordinals = np.arange(starts[0], ends[0])
        return Cells(np.full(len(ordinals), rows[0]), ordinals) if len(ordinals) else _NO_CELLS
    lengths = np.maximum(ends - starts, 0)
    total = int(lengths.sum())
    if not total:
        return _NO_CELLS
    before = np.cumsum(lengths) - lengths
    ordinals = np.arange(total) - np.repeat(before - starts, lengths)
    return Cells(np.repeat(rows, lengths), ordinals)


def _joined(first: Cells, second: Cells) -> Cells:
    if not len(first) or not len(second):
        return first if len(first) else second
    return Cells(np.concatenate([first.rows, second.rows]), np.concatenate([first.ordinals, second.ordinals]))
