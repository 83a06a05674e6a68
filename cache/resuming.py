"""How a suspended sequence becomes active: planned as a whole, then applied.

What the sequence will write into and only borrows - a partly matched block, a matched recurrent state - it copies into
slots of its own (docs/decisions/0010).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.cache.block_tables import Parked, by_pool_group
from kvferry.cache.errors import CapacityError
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.lifecycle import Counts, ceil_div
from kvferry.cache.page_table import SlotList
from kvferry.cache.sequence import Borrowed, SequenceCache

if TYPE_CHECKING:
    from kvferry.cache.manager import KVCacheManager


class Resumption(NamedTuple):
    """What a sequence needs to become active.

    Attributes:
        copies: borrowed pages to be copied.
        kept: borrowed pages that become the sequence's own: nobody else uses them, and there is no room for a copy.
        fresh: life cycles that need an empty page: that of recurrent states, when none was matched.
        scratch: scratch slots by life cycle.
    """

    copies: list[Borrowed]
    kept: list[Borrowed]
    fresh: list[LifeCycleId]
    scratch: dict[LifeCycleId, int]


def activate(manager: KVCacheManager, sequence: SequenceCache) -> int:
    """Give a suspended sequence a row with its pages. Returns the row.

    Raises: CapacityError: see `SequenceCache.resume`; nothing changed.
    """
    _check_utilisation(manager, sequence)
    plan = _plan(manager, sequence)
    copied, others = _slots(manager, [entry.life_cycle for entry in plan.copies]), _slots(manager, plan.fresh)
    for life_cycle, count in plan.scratch.items():
        others[manager.layout.life_cycles[life_cycle].pool_group] += count
    name = f"sequence {sequence.request_id}"
    manager.require_slots(name, copied + others, np.zeros_like(copied))
    if sequence.reserved is None:
        # The pages that copies are made of count as taken, and are given back.
        manager.promises.require(name, others.tolist())
    # Nothing below fails.
    for entry in plan.kept:
        manager.published.withdraw(entry.life_cycle, entry.slot)
    for group, count in enumerate((copied + others).tolist()):
        manager.published.make_room(group, count)
    row = manager.tables.open_row(
        Parked(*sequence.parked[:3], _tables(manager, sequence.parked, plan)),
        uses_scratch=manager.options.window_scratch,
        promised=sequence.reserved is not None,
    )
    manager.scratch.take(row, plan.scratch)
    return row


def _check_utilisation(manager: KVCacheManager, sequence: SequenceCache) -> None:
    """Raise CapacityError when others hold so much of a pool group that there would be no room to grow."""
    lent = [(entry.life_cycle, np.array([entry.slot], np.int32)) for entry in sequence.borrowed]
    own = by_pool_group(manager.layout, [table[table >= 0] for table in sequence.parked.tables], lent)
    for index, (allocator, ids) in enumerate(zip(manager.allocators, own, strict=True)):
        held = allocator.num_slots - allocator.num_available - allocator.idle_after(ids)
        limit = manager.options.max_util_for_resume
        if held / allocator.num_slots > limit:
            raise CapacityError(
                f"sequence {sequence.request_id} is not resumed: others hold {held} of {allocator.num_slots} slots "
                f"of pool group {index}, more than max_util_for_resume {limit} allows: retry after a release",
                requested=[len(ids) for ids in own],
                available=[a.num_available for a in manager.allocators],
            )


def _plan(manager: KVCacheManager, sequence: SequenceCache) -> Resumption:
    copies, kept = [], []
    room = [allocator.num_available for allocator in manager.allocators]
    for entry in sequence.borrowed:
        group = manager.layout.life_cycles[entry.life_cycle].pool_group
        if room[group] < 1 and manager.allocators[group].sole_user(entry.slot):
            kept.append(entry)
        else:
            copies.append(entry)
            room[group] -= 1
    return Resumption(copies, kept, _fresh_state(manager, sequence), manager.scratch.needed(sequence.parked))


def _fresh_state(manager: KVCacheManager, sequence: SequenceCache) -> list[LifeCycleId]:
    """The recurrent life cycle, if a sequence with blocks has no state page and borrows none."""
    recurrent, parked = manager.layout.recurrent, sequence.parked
    if recurrent is None or not parked.capacity or (parked.tables[recurrent.id] >= 0).any():
        return []
    return [recurrent.id] if all(entry.life_cycle != recurrent.id for entry in sequence.borrowed) else []


def _slots(manager: KVCacheManager, life_cycles: list[LifeCycleId]) -> Counts:
    """One slot for each of the life cycles, per pool group."""
    groups = [manager.layout.life_cycles[life_cycle].pool_group for life_cycle in life_cycles]
    return np.bincount(np.array(groups, np.int64), minlength=len(manager.allocators))


def _tables(manager: KVCacheManager, parked: Parked, plan: Resumption) -> tuple[SlotList, ...]:
    """The parked tables with the pages that make the sequence whole."""
    tables = [table.copy() for table in parked.tables]
    for entry in plan.copies:
        tables[entry.life_cycle][entry.ordinal] = _copy(manager, entry)
    for entry in plan.kept:
        tables[entry.life_cycle][entry.ordinal] = entry.slot
    for life_cycle in plan.fresh:
        ordinal = max(0, ceil_div(parked.history, manager.layout.tokens_per_block) - 1)
        group = manager.layout.life_cycles[life_cycle].pool_group
        tables[life_cycle][ordinal] = manager.allocators[group].acquire(1)[0]
    return tuple(tables)


def _copy(manager: KVCacheManager, entry: Borrowed) -> int:
    """A page of the sequence's own with the content of a borrowed one, which is given back."""
    group = manager.layout.life_cycles[entry.life_cycle].pool_group
    allocator, sources = manager.allocators[group], np.array([entry.slot], np.int32)
    target = allocator.acquire(1)
    manager.storage.copy_slots(group, sources, target)
    allocator.drop_user(sources)
    return int(target[0])
