"""Every invariant of pools (specification 1.4) is checked: the books are made wrong on purpose."""

from collections.abc import Callable

import numpy as np
import pytest

from kvferry.cache.errors import InvariantError, LocalProtocolError
from kvferry.cache.holds import Access
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from tests.cache.serving import manager_of, publish, serve, started
from tests.cache.specs import attention, recurrent

FULL, WINDOWED = LifeCycleId(0), LifeCycleId(1)
TOKENS = list(range(18))


def busy() -> tuple[KVCacheManager, SequenceCache]:
    """One active sequence with window, state, scratch pages and a transfer; one suspended; cached pages of a third."""
    manager = manager_of(attention(), attention(6), recurrent(32), slots=60, window_scratch=True)
    publish(manager, [7] * 9)
    sequence = started(manager)
    sequence.resize(capacity=16)
    sequence.commit(TOKENS[:16])
    sequence.resize(capacity=40)
    manager.hold(sequence.pages(16), Access.READ)
    serve(manager, [9] * 6).suspend()
    assert len(manager.scratch.of(sequence.row, WINDOWED))
    manager.check_integrity()
    return manager, sequence


def broken(change: Callable[[KVCacheManager, SequenceCache], object], story: str) -> None:
    manager, sequence = busy()
    change(manager, sequence)
    with pytest.raises(InvariantError, match=story) as caught:
        manager.check_integrity()
    assert caught.value.story


def test_invariant_1_committed_is_at_most_history() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.tables.committed[sequence.row] = 17

    broken(change, r"committed, history, capacity are \(17, 16, 40\)")


def test_invariant_1_history_is_at_most_capacity() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.tables.history[sequence.row] = 41

    broken(change, r"\(16, 41, 40\)")


def test_invariant_1_suspended_sequence_has_the_blocks_of_its_capacity() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        suspended = next(s for s in manager.sequences if s is not sequence)
        suspended.parked = suspended.parked._replace(capacity=20)

    broken(change, r"\[2, 2, 2\] blocks, its capacity needs 5")


def test_invariant_2_block_outside_the_stale_range_has_a_page() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        sequence.slots(FULL)[1] = -1

    broken(change, r"full: pages at \[0, 2")


def test_invariant_2_block_inside_the_stale_range_has_none() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        sequence.slots(WINDOWED)[0] = 55

    broken(change, r"window 6: pages at \[0, ")


def test_invariant_2_scratch_slots_are_as_many_as_the_scratch_blocks_need() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.scratch.slots[sequence.row, WINDOWED] = manager.scratch.slots[sequence.row, WINDOWED][:-1]

    broken(change, "scratch slots")


def test_invariant_2_active_rows_are_those_of_active_sequences() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.tables.active[9] = True

    broken(change, r"rows \[.*9.*\] are active, sequences have")


def test_invariant_2_rows_hold_nothing_beyond_their_blocks() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.tables.tables[FULL][sequence.row, 12] = 3

    broken(change, "beyond")


def test_invariant_2_page_has_exactly_the_users_that_list_it() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        sequence.slots(FULL)[1] = sequence.slots(FULL)[0]

    broken(change, "users, sequences and holds account for")


def test_invariant_3_published_page_stands_in_the_tree() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.published.tree.pages[manager.published.tree.find(manager.block_keys(TOKENS))[0], FULL] = -1

    broken(change, "the tree has others")


def test_invariant_3_page_in_the_tree_is_published() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        nodes = manager.published.tree.find(manager.block_keys(TOKENS))
        slot = manager.published.tree.pages[nodes[0], FULL]
        manager.allocators[0].unpublish(np.array([slot], np.int32))

    broken(change, "not published")


def test_invariant_3_page_covers_no_more_than_its_block() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.allocators[0]._coverage[sequence.slots(FULL)[0]] = 5

    broken(change, "covers more tokens")


def test_invariant_4_every_slot_is_free_held_or_cached() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.allocators[0]._is_free[sequence.slots(FULL)[0]] = True

    broken(change, "marked free and used")


def test_invariant_4_promises_are_those_of_the_open_sequences() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.promises.total[0] = 4

    broken(change, r"promised")


def test_invariant_5_pools_hold_as_many_slots_as_are_handed_out() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.storage.pools = tuple(pool[:-1] for pool in manager.storage.pools)

    broken(change, "its slots need")


def test_invariant_6_only_cached_pages_are_queued_for_eviction() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.allocators[0]._queue.push(sequence.slots(FULL)[:1].copy(), np.array([35], np.int16))

    broken(change, "queued for eviction")


def test_invariant_7_pools_are_cleared_only_while_no_sequence_is_open() -> None:
    manager, _ = busy()
    before = manager.usage()
    with pytest.raises(LocalProtocolError, match="2 sequences are open"):
        manager.clear_reusable()
    assert manager.usage() == before
    for sequence in list(manager.sequences):
        sequence.close()
    manager.clear_reusable()
    assert manager.usage()[0].cached == 0
    manager.check_integrity()


def test_invariant_8_page_of_a_transfer_counts_as_used() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.holds.open.clear()

    broken(change, "users, sequences and holds account for")


def test_invariant_8_transfers_are_those_of_the_holds() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        manager.allocators[0]._readers[:] = 0

    broken(change, "transfer")


def test_invariant_8_no_transfer_writes_into_a_published_page() -> None:
    def change(manager: KVCacheManager, sequence: SequenceCache) -> None:
        slot = sequence.slots(FULL)[0]
        manager.allocators[0]._readers[slot], manager.allocators[0]._writers[slot] = 0, 1

    broken(change, "writes into a published page")
