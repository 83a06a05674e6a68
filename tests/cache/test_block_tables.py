"""Rows of many sequences, planned and changed at once: against one sequence at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.block_tables import BlockTables, Cells, Parked
from kvferry.cache.layout import CacheLayout, build_layout
from kvferry.cache.lifecycle import ceil_div
from tests.cache.specs import attention, layout, model, recurrent

EMPTY = Parked(0, 0, 0, ())


def tables_of(windows: list[int | None], *, max_rewind_tokens: int = 0) -> BlockTables:
    return BlockTables(layout(windows).life_cycles, 4, max_rewind_tokens)


def opened(tables: BlockTables, *, uses_scratch: bool = False) -> int:
    blank = tuple(np.empty(0, np.int32) for _ in tables.tables)
    return tables.open_row(Parked(0, 0, 0, blank), uses_scratch=uses_scratch, promised=True)


def rows(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(values, np.int64)


def pairs(cells: Cells) -> list[tuple[int, int]]:
    return list(zip(cells.rows.tolist(), cells.ordinals.tolist(), strict=True))


def change(tables: BlockTables, row: int, *, history: int, capacity: int, first_slot: int = 100) -> None:
    """Move one row's cursors; new pages get slots from `first_slot` on."""
    plan = tables.plan(rows(row), rows(history), rows(capacity))
    tables.apply(plan, [np.arange(len(part.taken), dtype=np.int32) + first_slot for part in plan.life_cycles])


def test_row_is_given_back_with_all_it_held() -> None:
    tables = tables_of([None])
    row = opened(tables)
    change(tables, row, history=3, capacity=9)
    parked = tables.close_row(row)
    assert parked[:3] == (0, 3, 9)
    assert parked.tables[0].tolist() == [100, 101, 102]
    assert (tables.tables[0] < 0).all()
    again = tables.open_row(parked, uses_scratch=False, promised=True)
    assert tables.row(0, again).tolist() == [100, 101, 102]


def test_rows_and_widths_grow_as_needed() -> None:
    tables = tables_of([None])
    opened_rows = [opened(tables) for _ in range(40)]
    assert len(set(opened_rows)) == 40
    for row in opened_rows:
        change(tables, row, history=0, capacity=row * 8)
    assert [tables.num_blocks(row) for row in opened_rows] == [row * 2 for row in opened_rows]


def test_plan_changes_nothing() -> None:
    tables = tables_of([None, 6])
    row = opened(tables)
    change(tables, row, history=0, capacity=8)
    before = [table.copy() for table in tables.tables]
    tables.plan(rows(row), rows(8), rows(40))
    assert all(np.array_equal(a, b) for a, b in zip(before, tables.tables, strict=True))
    assert tables.capacity[row] == 8


def test_blocks_that_are_born_stale_are_never_taken() -> None:
    tables = tables_of([5])
    row = opened(tables)
    plan = tables.plan(rows(row), rows(20), rows(21))
    # (20 + 1 - 5) // 4 = 4 blocks are out of the window.
    assert pairs(plan.life_cycles[0].taken) == [(row, 4), (row, 5)]


def test_sinks_are_taken_and_stay() -> None:
    sinks = build_layout(model(attention(4, sink_tokens=6)), tokens_per_block=4)
    tables = BlockTables(sinks.life_cycles, 4, 0)
    row = opened(tables)
    change(tables, row, history=0, capacity=4)
    change(tables, row, history=32, capacity=32, first_slot=200)
    assert tables.row(0, row).tolist() == [100, 200, -1, -1, -1, -1, -1, 201]


def test_state_stands_at_the_block_of_the_last_token_of_history() -> None:
    tables = BlockTables(build_layout(model(attention(), recurrent(4)), tokens_per_block=4).life_cycles, 4, 0)
    row = opened(tables)
    for history, capacity, ordinal in [(0, 6, 0), (3, 6, 0), (4, 9, 0), (5, 9, 1), (9, 30, 2)]:
        change(tables, row, history=history, capacity=capacity)
        assert np.flatnonzero(tables.row(1, row) >= 0).tolist() == [ordinal]
        assert tables.row(1, row)[ordinal] == 100


def test_state_goes_with_the_last_block() -> None:
    tables = BlockTables(build_layout(model(recurrent(4)), tokens_per_block=4).life_cycles, 4, 0)
    row = opened(tables)
    change(tables, row, history=0, capacity=8)
    plan = tables.plan(rows(row), rows(0), rows(0))
    assert tables.dropped_slots(plan, 0).tolist() == [100]


def expected_pages(made: CacheLayout, index: int, history: int, capacity: int) -> list[int]:
    blocks, p = ceil_div(capacity, 4), made.tokens_per_block
    rule = made.life_cycles[index].life_cycle
    if rule.recurrent:
        return [max(0, ceil_div(history, p) - 1)] if blocks else []
    stale = rule.stale_range(history, p)
    return [ordinal for ordinal in range(blocks) if not stale.start <= ordinal < stale.end]


moves = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(-6, 20)), min_size=3, max_size=3), max_size=12)


@given(
    kinds=st.lists(
        st.one_of(
            st.builds(lambda window, sink: attention(window, sink_tokens=sink), st.integers(1, 14), st.integers(0, 9)),
            st.just(attention()),
            st.just(recurrent(2)),
        ),
        min_size=1,
        max_size=3,
    ),
    steps=moves,
)
def test_every_block_that_is_not_stale_has_one_page_of_its_own(kinds: list, steps: list) -> None:
    """Many rows in one change: pages are where the rule says, and a slot is in one place until it is dropped."""
    made = build_layout(model(*kinds), tokens_per_block=4)
    tables = BlockTables(made.life_cycles, 4, 0)
    opened_rows = rows(*[opened(tables) for _ in range(3)])
    fresh, used = 0, [set[int]() for _ in made.life_cycles]
    for step in steps:
        history = tables.history[opened_rows] + [advance for advance, _ in step]
        capacity = np.maximum(history, tables.capacity[opened_rows] + [grow for _, grow in step])
        plan = tables.plan(opened_rows, history, capacity)
        slots = []
        for index, part in enumerate(plan.life_cycles):
            gone = tables.dropped_slots(plan, index).tolist()
            assert len(set(gone)) == len(gone)
            assert set(gone) <= used[index]
            used[index] -= set(gone)
            slots.append(np.arange(fresh, fresh + len(part.taken), dtype=np.int32))
            used[index] |= set(slots[-1].tolist())
            fresh += len(part.taken)
        tables.apply(plan, slots)
        for index in range(len(made.life_cycles)):
            held: list[int] = []
            for row, h, c in zip(opened_rows.tolist(), history.tolist(), capacity.tolist(), strict=True):
                assert np.flatnonzero(tables.row(index, row) >= 0).tolist() == expected_pages(made, index, h, c)
                held += [slot for slot in tables.row(index, row).tolist() if slot >= 0]
            assert sorted(held) == sorted(used[index])
