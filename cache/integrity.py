"""Do the books of a manager add up? Every invariant of the pools, looked at from the outside.

Source: pools specification 1.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvferry.cache.errors import InvariantError
from kvferry.cache.holds import Access
from kvferry.cache.layout import LifeCycleLayout
from kvferry.cache.lifecycle import BlockRange, Counts, ceil_div
from kvferry.cache.page_table import SlotList

if TYPE_CHECKING:
    from kvferry.cache.manager import KVCacheManager
    from kvferry.cache.sequence import SequenceCache


def check_manager(manager: KVCacheManager) -> None:
    """Raise InvariantError with the numbers of the first disagreement."""
    for sequence in manager.sequences:
        _check_cursors(manager, sequence)
        for group in manager.layout.life_cycles:
            _check_pages(manager, sequence, group)
    _check_rows(manager)
    _check_promises(manager)
    for index in range(len(manager.allocators)):
        _check_group(manager, index)
        _check_transfers(manager, index)
    manager.published.check_integrity()


def _check_rows(manager: KVCacheManager) -> None:
    """Rows are those of the active sequences, and hold nothing beyond their blocks."""
    tables, rows = manager.tables, sorted(sequence.row for sequence in manager.sequences if sequence.row >= 0)
    if rows != np.flatnonzero(tables.active).tolist():
        raise InvariantError(f"rows {np.flatnonzero(tables.active).tolist()} are active, sequences have {rows}")
    blocks = np.where(tables.active, -(-tables.capacity // manager.layout.tokens_per_block), 0)
    for table in tables.tables:
        beyond = (table >= 0) & (np.arange(table.shape[1]) >= blocks[:, None])
        if beyond.any():
            raise InvariantError(f"rows {np.flatnonzero(beyond.any(axis=1)).tolist()} have pages beyond their blocks")


def _check_promises(manager: KVCacheManager) -> None:
    reserved = [sequence.reserved for sequence in manager.sequences if sequence.reserved is not None]
    expected = np.sum([[0] * len(manager.allocators), *reserved], axis=0).tolist()
    promised = [usage.reserved for usage in manager.usage()]
    if promised != expected:
        raise InvariantError(f"{promised} slots are promised per pool group, open sequences reserved {expected}")


def _check_cursors(manager: KVCacheManager, sequence: SequenceCache) -> None:
    if not 0 <= sequence.committed <= sequence.history <= sequence.capacity:
        cursors = (sequence.committed, sequence.history, sequence.capacity)
        raise InvariantError(f"sequence {sequence.request_id}: committed, history, capacity are {cursors}")
    blocks = ceil_div(sequence.capacity, manager.layout.tokens_per_block)
    lengths = [len(sequence.slots(group.id)) for group in manager.layout.life_cycles]
    if any(length != blocks for length in lengths):
        raise InvariantError(f"sequence {sequence.request_id}: {lengths} blocks, its capacity needs {blocks}")


def _check_pages(manager: KVCacheManager, sequence: SequenceCache, group: LifeCycleLayout) -> None:
    """Outside the stale and the scratch range every block has a page, inside none has."""
    slots, p = sequence.slots(group.id), manager.layout.tokens_per_block
    stale = group.life_cycle.stale_range(sequence.history, p).clipped(len(slots))
    expected = np.ones(len(slots), np.bool_)
    expected[stale.start : stale.end] = False
    if group.life_cycle.recurrent:
        expected[stale.end + 1 :] = False
    scratch = _scratch(manager, sequence, group)
    expected[scratch.start : scratch.end] = False
    borrowed = [entry.ordinal for entry in sequence.borrowed if entry.life_cycle == group.id]
    expected[borrowed] = False
    if group.life_cycle.recurrent and sequence.row < 0 and not (slots >= 0).any():
        expected[:] = False  # matched for a transfer: its state comes with the first resume
    if not np.array_equal(slots >= 0, expected):
        raise InvariantError(
            f"sequence {sequence.request_id}, {group.life_cycle}: pages at {np.flatnonzero(slots >= 0).tolist()}, "
            f"expected at {np.flatnonzero(expected).tolist()}; stale is {stale}, scratch {scratch}"
        )


def _scratch(manager: KVCacheManager, sequence: SequenceCache, group: LifeCycleLayout) -> BlockRange:
    """Blocks on scratch pages. Their number must be that of the scratch slots."""
    if not manager.options.window_scratch:
        return BlockRange(0, 0)
    blocks = group.life_cycle.scratch_range(
        sequence.history, sequence.capacity, manager.layout.tokens_per_block, manager.options.max_rewind_tokens
    )
    if sequence.row >= 0:
        have = len(manager.scratch.of(sequence.row, group.id))
        if have != ceil_div(len(blocks), group.sub_pages):
            raise InvariantError(f"sequence {sequence.request_id}: {have} scratch slots for blocks {blocks}")
    return blocks


def _check_group(manager: KVCacheManager, index: int) -> None:
    """Every slot's users are exactly the sequences and holds that list it."""
    allocator = manager.allocators[index]
    allocator.check_integrity()
    expected = _count_users(manager, index)
    wrong = np.flatnonzero(expected != allocator.users())
    if len(wrong):
        raise InvariantError(
            f"pool group {index}: slots {wrong.tolist()} have {allocator.users()[wrong].tolist()} users, sequences and "
            f"holds account for {expected[wrong].tolist()}"
        )
    pools = manager.storage.pool_indices(index)
    sizes = [manager.storage.pools[pool].numel() for pool in pools]
    needed = [allocator.num_slots * size for size in manager.layout.pool_groups[index].pool_bytes]
    if sizes != needed:
        raise InvariantError(f"pool group {index}: its pools have {sizes} bytes, its slots need {needed}")


def _check_transfers(manager: KVCacheManager, index: int) -> None:
    """Every slot's readers and writers are exactly the holds that list it."""
    allocator, holds = manager.allocators[index], manager.holds.open.values()
    for access, counted in zip((Access.READ, Access.WRITE), allocator.transfers(), strict=True):
        lists = [np.empty(0, np.int32), *(hold.slots[index] for hold in holds if hold.access is access)]
        wrong = np.flatnonzero(np.bincount(np.concatenate(lists), minlength=allocator.num_slots) != counted)
        if len(wrong):
            raise InvariantError(f"pool group {index}: slots {wrong.tolist()} count {access.value} transfers wrongly")


def _count_users(manager: KVCacheManager, index: int) -> Counts:
    members = [group.id for group in manager.layout.life_cycles if group.pool_group == index]
    lists: list[SlotList] = [hold.slots[index] for hold in manager.holds.open.values()]
    for sequence in manager.sequences:
        for life_cycle in members:
            slots = sequence.slots(life_cycle)
            lists.append(slots[slots >= 0])
        lists.append(np.array([b.slot for b in sequence.borrowed if b.life_cycle in members], np.int32))
    lists += [slots for (_, life_cycle), slots in manager.scratch.slots.items() if life_cycle in members]
    return np.bincount(np.concatenate([*lists, np.empty(0, np.int32)]), minlength=manager.allocators[index].num_slots)
