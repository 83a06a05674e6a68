"""The order in which cached pages go, and that only cached ones go."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.eviction import EvictionQueue
from kvferry.cache.ids import LifeCycleId
from tests.cache.serving import free, manager_of, present, publish, published_pages, serve, started
from tests.cache.specs import attention

A, B, C = [1] * 8, [2] * 8, [3] * 8


def queue_of(pushes: list[tuple[list[int], int]], num_slots: int = 32) -> EvictionQueue:
    queue = EvictionQueue(num_slots)
    for slots, priority in pushes:
        queue.push(np.array(slots, np.int32), np.full(len(slots), priority, np.int16))
    return queue


def test_queue_lowest_priority_first_then_least_recently_used() -> None:
    queue = queue_of([([1, 2], 35), ([3], 80), ([4], 35), ([5], 0)])
    assert queue.first(9).tolist() == [5, 1, 2, 4, 3]
    assert queue.first(0).tolist() == []
    assert queue.num_queued == 5


def test_queue_of_mixed_priorities_in_one_push() -> None:
    queue = EvictionQueue(8)
    queue.push(np.array([0, 1, 2], np.int32), np.array([9, 3, 9], np.int16))
    assert queue.first(2).tolist() == [1, 0]


def test_queue_slot_that_left_and_came_back_is_last() -> None:
    queue = queue_of([([1, 2, 3], 35)])
    queue.discard(np.array([1], np.int32))
    queue.push(np.array([1], np.int32), np.array([35], np.int16))
    assert queue.first(9).tolist() == [2, 3, 1]


def test_queue_refuses_a_slot_twice() -> None:
    with pytest.raises(AssertionError, match="at most once"):
        queue_of([([1], 35), ([1], 35)])


@given(steps=st.lists(st.tuples(st.integers(0, 7), st.sampled_from([0, 35, 80]), st.booleans()), max_size=3000))
def test_queue_is_that_of_a_plain_list(steps: list[tuple[int, int, bool]]) -> None:
    """Also when dead entries outnumber the slots many times."""
    queue, plain = EvictionQueue(8), list[tuple[int, int]]()
    for slot, priority, look in steps:
        if slot in [s for _, s in plain]:
            plain = [entry for entry in plain if entry[1] != slot]
            queue.discard(np.array([slot], np.int32))
        else:
            plain.append((priority, slot))
            queue.push(np.array([slot], np.int32), np.array([priority], np.int16))
        if look:
            assert queue.first(3).tolist() == [s for _, s in sorted(plain, key=lambda entry: entry[0])][:3]
    assert queue.num_queued == len(plain)
    assert queue.queued().tolist() == sorted(s for _, s in plain)


def test_queue_stays_small_when_slots_come_and_go() -> None:
    queue, slots = EvictionQueue(8), np.arange(8, dtype=np.int32)
    for _ in range(5000):
        queue.push(slots, np.full(8, 35, np.int16))
        queue.discard(slots)
    assert sum(len(batch) for batches in queue._batches.values() for _, batch in batches) < 2000


# ---- pages of a manager


def test_evicted_first_is_the_lowest_priority() -> None:
    manager = manager_of(attention(), slots=6)
    publish(manager, A, priority=80)
    publish(manager, B, priority=10)
    publish(manager, C, priority=35)
    started(manager).resize(capacity=4)
    assert [manager.probe(tokens) for tokens in (A, B, C)] == [8, 4, 8]


def test_evicted_first_is_the_least_recently_used_of_one_priority() -> None:
    manager = manager_of(attention(), slots=6)
    for tokens in (A, B, C):
        publish(manager, tokens)
    started(manager, A).close()
    started(manager).resize(capacity=8)
    assert [manager.probe(tokens) for tokens in (A, B, C)] == [8, 0, 8]


def test_evicted_first_is_the_leaf() -> None:
    manager = manager_of(attention(), slots=6)
    publish(manager, list(range(24)))
    other = started(manager)
    for blocks in range(1, 7):
        other.resize(capacity=4 * blocks)
        assert manager.probe(list(range(24))) == 24 - 4 * blocks


def test_priority_may_differ_by_block_and_life_cycle() -> None:
    manager = manager_of(attention(), attention(20), slots=8)
    publish(manager, list(range(16)), priority=lambda ordinal, life_cycle: 10 if life_cycle else 50)
    started(manager).resize(capacity=4)
    # Two slots were needed, and both are those of the windowed life cycle.
    assert published_pages(manager, list(range(16)), 0) == [4] * 4
    assert published_pages(manager, list(range(16)), 1) == [4, 4, 0, 0]


def test_eviction_under_pressure_never_touches_used_pages() -> None:
    manager = manager_of(attention(), attention(6), slots=14)
    user = serve(manager, list(range(12)))
    publish(manager, B)
    before = [user.slots(LifeCycleId(index)).tolist() for index in range(2)]
    hog = started(manager)
    while True:
        room = manager.allocators[0].num_available
        if room < 2:
            break
        hog.resize(capacity=hog.capacity + 4)
    assert [user.slots(LifeCycleId(index)).tolist() for index in range(2)] == before
    assert manager.probe(B) == 0
    assert manager.probe(list(range(12))) == 12
    manager.check_integrity()


def test_losing_a_full_attention_page_takes_everything_after_it() -> None:
    manager = manager_of(attention(), attention(6), slots=40)
    publish(manager, list(range(24)))
    cached = manager.usage()[0].cached
    first = manager.published.tree.pages[manager.published.tree.find(manager.block_keys(list(range(8))))][1, 0]
    manager.published.evict(0, np.array([first], np.int32))
    assert manager.probe(list(range(24))) == 4
    assert (cached, manager.usage()[0].cached) == (12, 2)
    manager.check_integrity()


def test_losing_a_sink_page_takes_everything_after_it() -> None:
    manager = manager_of(attention(6, sink_tokens=4), slots=40)
    publish(manager, list(range(24)))
    sink = manager.published.tree.pages[manager.published.tree.find(manager.block_keys(list(range(4))))][0, 0]
    manager.published.evict(0, np.array([sink], np.int32))
    assert (manager.probe(list(range(24))), manager.usage()[0].cached) == (0, 0)


def test_losing_a_window_page_takes_the_broken_window_along() -> None:
    # Window 9 needs 8 tokens before the query: two whole blocks, here blocks 4 and 5, or all from block 0 on.
    manager = manager_of(attention(), attention(9), slots=40)
    tokens = list(range(24))
    publish(manager, tokens)
    nodes = manager.published.tree.find(manager.block_keys(tokens))
    manager.published.evict(0, manager.published.tree.pages[nodes[[2, 4]], 1])
    # Block 3 lies alone between two lost ones, and block 5 after the end of its window: neither serves a match.
    assert published_pages(manager, tokens, 1) == [4, 4, 0, 0, 0, 0]
    assert (manager.probe(tokens), free(manager)) == (8, [40 - 6 - 2])
    manager.check_integrity()


def test_recycled_slots_of_a_broken_window_serve_others_at_once() -> None:
    manager = manager_of(attention(5), slots=4)
    publish(manager, list(range(16)))
    other = started(manager)
    other.resize(capacity=16)
    assert present(other, 0) == [0, 1, 2, 3]
    assert (manager.probe(list(range(16))), manager.usage()[0].cached) == (0, 0)
