"""Who uses a slot, and what becomes of it."""

import numpy as np
import pytest

from kvferry.cache.errors import InvariantError
from kvferry.cache.slots import NO_NODE, SlotAllocator, SlotIds


def ids(*slots: int) -> SlotIds:
    return np.array(slots, np.int32)


def publish(allocator: SlotAllocator, slots: SlotIds, priority: int = 35) -> None:
    allocator.publish(slots, slots.copy(), 0, 4, np.full(len(slots), priority, np.int16))


def test_acquire_hands_out_lowest_ids_first() -> None:
    allocator = SlotAllocator(6)
    allocator.acquire(4)
    allocator.drop_user(ids(2, 0))
    assert allocator.acquire(3).tolist() == [0, 2, 4]


def test_acquire_finds_free_slots_beyond_one_scan() -> None:
    allocator = SlotAllocator(10_000)
    allocator.acquire(10_000)
    allocator.drop_user(ids(9_000, 4_096, 1))
    assert allocator.acquire(3).tolist() == [1, 4_096, 9_000]
    assert allocator.acquire(0).tolist() == []


def test_epoch_grows_with_every_life_of_a_slot() -> None:
    allocator = SlotAllocator(1)
    for life in range(1, 4):
        slot = allocator.acquire(1)
        assert allocator.epochs(slot).tolist() == [life]
        allocator.drop_user(slot)


def test_slot_with_a_second_user_stays_taken_until_both_are_gone() -> None:
    allocator = SlotAllocator(2)
    slot = allocator.acquire(1)
    allocator.add_user(slot)
    assert (allocator.idle_after(slot), allocator.idle_after(ids(0, 0))) == (0, 1)
    assert not allocator.sole_user(0)
    allocator.drop_user(slot)
    assert (allocator.num_free, allocator.idle_after(slot), allocator.sole_user(0)) == (1, 1, True)
    allocator.drop_user(slot)
    assert allocator.num_free == 2
    allocator.check_integrity()


def test_both_users_of_a_slot_may_go_in_one_call() -> None:
    allocator = SlotAllocator(2)
    slot = allocator.acquire(1)
    allocator.add_user(slot)
    allocator.drop_users(ids(0, 0))
    assert allocator.num_free == 2
    allocator.check_integrity()


def test_several_users_going_at_once_leave_what_follows_in_a_prompt_to_go_first() -> None:
    allocator = SlotAllocator(5)
    slots = allocator.acquire(5)
    publish(allocator, slots)
    allocator.add_user(ids(0, 1))
    # Two sequences share 0 and 1 and go on with 2, and with 3; slot 4 keeps its user.
    allocator.drop_users(ids(0, 1, 2, 0, 1, 3))
    victims = allocator.next_victims(9).tolist()
    assert sorted(victims) == [0, 1, 2, 3]
    assert victims.index(0) > victims.index(1) > max(victims.index(2), victims.index(3))
    allocator.check_integrity()


def test_free_slots_cannot_gain_or_drop_users() -> None:
    allocator = SlotAllocator(2)
    with pytest.raises(AssertionError, match="free slot"):
        allocator.add_user(ids(1))
    with pytest.raises(AssertionError, match="without users"):
        allocator.drop_user(ids(1))
    with pytest.raises(AssertionError, match="make room before acquiring"):
        SlotAllocator(2).acquire(3)


def test_published_slot_without_users_is_cached_and_free_once_unpublished() -> None:
    allocator = SlotAllocator(4)
    slots = allocator.acquire(2)
    publish(allocator, slots)
    assert allocator.num_cached == 0
    allocator.drop_user(slots)
    assert (allocator.num_free, allocator.num_cached, allocator.num_available) == (2, 2, 4)
    allocator.add_user(ids(1))
    assert (allocator.num_cached, allocator.next_victims(9).tolist()) == (1, [0])
    allocator.unpublish(slots)
    assert (allocator.num_free, allocator.num_cached) == (3, 0)
    allocator.check_integrity()


def test_what_follows_a_block_goes_before_it() -> None:
    allocator = SlotAllocator(4)
    slots = allocator.acquire(4)
    publish(allocator, slots)
    allocator.drop_user(slots)
    assert allocator.next_victims(3).tolist() == [3, 2, 1]


def test_transfer_keeps_a_slot_and_is_counted() -> None:
    allocator = SlotAllocator(3)
    slots = allocator.acquire(2)
    allocator.begin_transfer(slots, writes=True)
    allocator.begin_transfer(ids(1), writes=False)
    # What is read counts as kept also while a sequence has it: that may give it up.
    assert (allocator.num_transferring, allocator.num_kept, allocator.written(slots).tolist()) == (2, 1, [0, 1])
    allocator.drop_user(slots)
    assert (allocator.num_free, allocator.num_kept) == (1, 2)
    allocator.end_transfer(slots, writes=True)
    assert (allocator.num_free, allocator.num_transferring) == (2, 1)
    allocator.end_transfer(ids(1), writes=False)
    assert allocator.num_free == 3
    allocator.check_integrity()


def test_slot_with_a_reader_or_a_second_sequence_is_shared() -> None:
    allocator = SlotAllocator(3)
    slots = allocator.acquire(3)
    allocator.begin_transfer(ids(0), writes=False)
    allocator.begin_transfer(ids(1), writes=True)
    allocator.add_user(ids(2))
    assert allocator.shared(slots).tolist() == [True, False, True]


# ---- check_integrity tells what is wrong


def holding() -> SlotAllocator:
    """Slot 0 held, 1 cached, 2 free."""
    allocator = SlotAllocator(3)
    slots = allocator.acquire(2)
    publish(allocator, slots)
    allocator.drop_user(ids(1))
    allocator.check_integrity()
    return allocator


def test_integrity_a_lost_slot_is_neither_free_nor_used() -> None:
    allocator = holding()
    allocator._is_free[2] = False
    with pytest.raises(InvariantError, match=r"slots \[2\] are marked free and used, or neither"):
        allocator.check_integrity()


def test_integrity_a_used_slot_is_not_free() -> None:
    allocator = holding()
    allocator._users[2] = 1
    with pytest.raises(InvariantError, match=r"slots \[2\]"):
        allocator.check_integrity()


def test_integrity_the_number_of_free_slots_is_that_of_the_marks() -> None:
    allocator = holding()
    allocator._num_free = 2
    with pytest.raises(InvariantError, match=r"\(2, 1\) slots counted free and cached, 1, 1 are"):
        allocator.check_integrity()


def test_integrity_a_used_page_is_not_in_the_eviction_queue() -> None:
    allocator = holding()
    allocator._queue.push(ids(0), np.array([35], np.int16))
    with pytest.raises(InvariantError, match=r"cached slots \[1\], queued for eviction \[0, 1\]"):
        allocator.check_integrity()


def test_integrity_a_cached_page_is_in_the_eviction_queue() -> None:
    allocator = holding()
    allocator._queue.discard(ids(1))
    with pytest.raises(InvariantError, match=r"queued for eviction \[\]"):
        allocator.check_integrity()


def test_integrity_a_page_is_queued_only_once() -> None:
    allocator = holding()
    stamp = int(allocator._queue._stamps[1])
    allocator._queue._batches[35].appendleft((stamp, ids(1, 1)))
    with pytest.raises(InvariantError, match="exactly once"):
        allocator.check_integrity()


def test_integrity_a_transfer_is_a_user() -> None:
    allocator = holding()
    allocator._readers[0] = 2
    with pytest.raises(InvariantError, match="transfer"):
        allocator.check_integrity()


def test_integrity_no_transfer_writes_into_a_published_page() -> None:
    allocator = holding()
    allocator._users[0] += 1
    allocator._writers[0] += 1
    with pytest.raises(InvariantError, match="writes into a published page"):
        allocator.check_integrity()
    allocator._nodes[0] = NO_NODE
    allocator.check_integrity()
