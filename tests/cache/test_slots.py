import numpy as np
import pytest

from kvferry.cache.errors import InvariantError
from kvferry.cache.slots import SlotAllocator


def test_acquire_hands_out_lowest_ids_first() -> None:
    allocator = SlotAllocator(6)
    allocator.acquire(4)
    allocator.drop_user(np.array([2, 0], np.int32))
    assert allocator.acquire(3).tolist() == [0, 2, 4]


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
    assert allocator.last_users(slot) == 0
    allocator.drop_user(slot)
    assert (allocator.num_free, allocator.last_users(slot)) == (1, 1)
    allocator.drop_user(slot)
    assert allocator.num_free == 2
    allocator.check_integrity()


def test_free_slots_cannot_gain_or_drop_users() -> None:
    allocator = SlotAllocator(2)
    free = np.array([1], np.int32)
    with pytest.raises(AssertionError, match="free slot"):
        allocator.add_user(free)
    with pytest.raises(AssertionError, match="free slot"):
        allocator.drop_user(free)
    with pytest.raises(AssertionError, match="check before acquiring"):
        allocator.acquire(3)


def test_check_integrity_tells_a_lost_slot() -> None:
    allocator = SlotAllocator(3)
    allocator._free.pop()
    with pytest.raises(InvariantError, match="slots without users"):
        allocator.check_integrity()
