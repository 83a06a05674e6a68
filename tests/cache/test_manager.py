"""Sequences and their manager by example: growth, windows, memory and reuse."""

import contextlib

import numpy as np
import pytest
import torch

from kvferry.cache.errors import CapacityError, ConfigError
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.layout import build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceState
from kvferry.cache.sizing import decode_steps, peak_slots
from tests.cache.serving import books, free, manager_of, present, publish, published_pages, serve, started
from tests.cache.specs import attention, layout, recurrent, spec

FULL, WINDOWED = LifeCycleId(0), LifeCycleId(1)
TOKENS = list(range(24))


# ---- growth and windows


def test_new_sequence_is_suspended_and_empty() -> None:
    sequence = manager_of(attention()).create_sequence("a")
    assert sequence.state is SequenceState.SUSPENDED
    assert (sequence.committed, sequence.history, sequence.capacity, sequence.num_blocks) == (0, 0, 0, 0)


def test_resize_grows_by_blocks_and_close_gives_everything_back() -> None:
    manager = manager_of(attention(), slots=8)
    sequence = started(manager)
    sequence.resize(capacity=9)
    assert sequence.slots(FULL).tolist() == [0, 1, 2]
    sequence.resize(capacity=12)
    assert (sequence.num_blocks, free(manager)) == (3, [5])
    manager.check_integrity()
    sequence.close()
    sequence.close()
    assert (free(manager), sequence.num_blocks, sequence.closed) == ([8], 0, True)
    manager.check_integrity()


def test_history_ahead_takes_only_pages_inside_the_window() -> None:
    manager = manager_of(attention(), attention(8))
    sequence = started(manager)
    sequence.resize(capacity=30, history=30)
    assert present(sequence, WINDOWED) == [5, 6, 7]
    assert present(sequence, FULL) == list(range(8))
    manager.check_integrity()


def test_gemma3_decode_side_takes_exactly_the_pages_of_the_formula() -> None:
    # Window 512, block 32, 1500 tokens: (1500 + 1 - 512) // 32 = 30 of 47 blocks are stale.
    model = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    manager = KVCacheManager(model, (20, 50))
    sequence = manager.create_sequence("a", peak_slots(model, decode_steps(1500, 32)))
    sequence.resume()
    sequence.resize(capacity=1500, history=1500)
    pages = sequence.pages(1500)
    assert [int((slots >= 0).sum()) for slots in pages.slots] == [17, 47]
    assert [len(slots) for slots in pages.slots] == [47, 47]
    assert np.flatnonzero(pages.slots[0] >= 0).tolist() == list(range(30, 47))
    assert free(manager) == [3, 3]


def test_step_that_frees_and_takes_at_once_needs_no_spare_slot() -> None:
    manager = manager_of(attention(5), slots=2)
    sequence = started(manager)
    sequence.resize(capacity=8)
    sequence.resize(history=8, capacity=12)
    assert sequence.slots(FULL).tolist() == [-1, 1, 0]
    manager.check_integrity()


def test_rewind_drops_trailing_blocks_only() -> None:
    sequence = started(manager_of(attention()))
    sequence.resize(capacity=20, history=9)
    sequence.resize(capacity=10)
    assert sequence.slots(FULL).tolist() == [0, 1, 2]


def test_resize_without_enough_slots_changes_nothing() -> None:
    manager = manager_of(attention(), attention(8), slots=9)
    sequence = started(manager)
    sequence.resize(capacity=16)
    before = books(manager)
    with pytest.raises(CapacityError) as caught:
        sequence.resize(capacity=24)
    assert (caught.value.requested, caught.value.available, caught.value.permanent) == ((4,), (1,), False)
    assert books(manager) == before
    manager.check_integrity()


def test_resize_many_moves_all_or_none() -> None:
    manager = manager_of(attention(), attention(6), slots=10)
    sequences = [started(manager) for _ in range(2)]
    manager.resize_many(sequences, capacity=np.array([8, 4]), history=np.array([0, 0]))
    assert [sequence.capacity for sequence in sequences] == [8, 4]
    before = books(manager)
    with pytest.raises(CapacityError, match="a step of 2 sequences") as caught:
        manager.resize_many(sequences, capacity=np.array([12, 12]))
    assert (caught.value.requested, caught.value.available) == ((6,), (4,))
    assert books(manager) == before
    # What one gives up, the other can have.
    manager.resize_many(sequences, capacity=np.array([4, 16]), history=np.array([4, 12]))
    assert [len(present(s, 0)) + len(present(s, 1)) for s in sequences] == [2, 7]
    manager.check_integrity()


def test_suspended_sequence_keeps_its_pages_and_gets_another_row() -> None:
    manager = manager_of(attention())
    sequence = started(manager)
    sequence.resize(capacity=9, history=4)
    slots, row = sequence.slots(FULL).tolist(), sequence.row
    sequence.suspend()
    other = started(manager)
    other.resize(capacity=4)
    assert (other.row, sequence.row, sequence.slots(FULL).tolist()) == (row, -1, slots)
    sequence.resume()
    assert (sequence.row != row, sequence.slots(FULL).tolist(), sequence.history) == (True, slots, 4)
    manager.check_integrity()


# ---- memory


def test_buffer_views_cover_disjoint_bytes_of_the_pool() -> None:
    manager = KVCacheManager(layout([None, 8]), (3,))
    for value, (layer, role) in enumerate([(0, "key"), (0, "value"), (1, "key"), (1, "value")], start=1):
        view = manager.buffer(layer, role)
        assert view.shape == (3, 2, 4, 8)
        # Both layers take slots of one shared pool: layer 0 fills slot 0, layer 1 slot 1.
        view[layer].fill_(float(value))
    pool = manager.storage.pools[0].view(torch.float32).reshape(3, -1)
    assert [pool[slot].unique().tolist() for slot in range(3)] == [[1.0, 2.0], [3.0, 4.0], [0.0]]


def test_buffers_of_their_own_base_lie_in_a_second_pool_under_the_same_slots() -> None:
    manager = manager_of(attention(scale_dim=2), attention(5, scale_dim=2))
    assert [len(group.pool_bytes) for group in manager.layout.pool_groups] == [2]
    table = manager.page_table()
    assert [group.pools for group in table.layer_groups] == [(0, 1), (0, 1)]
    scales = manager.buffer(0, "key_block_scale")
    assert (scales.dtype, scales.shape) == (torch.uint8, (32, 2, 4, 2))
    assert table.pools[1].base <= scales.data_ptr() < table.pools[1].base + 32 * table.pools[1].slot_bytes


def test_pools_larger_than_the_memory_of_the_device_are_refused_before_it_is_touched() -> None:
    with pytest.raises(ConfigError, match=r"the pools need \d+ bytes, cpu has \d+ bytes of memory available"):
        KVCacheManager(layout([None]), (1 << 40,))


@pytest.mark.parametrize("num_slots", [(), (0,), (4, 4)])
def test_manager_wrong_slot_counts_are_refused(num_slots: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="positive counts"):
        KVCacheManager(layout([None]), num_slots)


def test_page_table_addresses_are_those_of_the_pools() -> None:
    manager = KVCacheManager(layout([8, 8, None]), (3, 5))
    table = manager.page_table()
    assert [(pool.base, pool.num_slots) for pool in table.pools] == [
        (pool.data_ptr(), count) for pool, count in zip(manager.storage.pools, (3, 5), strict=True)
    ]
    assert [group.pools for group in table.layer_groups] == [(0,), (1,)]


# ---- reuse


def test_full_blocks_are_shared_and_a_partial_one_is_copied_on_the_first_resume() -> None:
    manager = manager_of(attention())
    first = serve(manager, TOKENS[:10])
    manager.buffer(0, "key")[first.slots(FULL)[2], :, :2] = 7.0
    first.stop_committing()
    second = manager.create_sequence("b", token_ids=TOKENS[:10])
    assert (second.reused_tokens, second.slots(FULL).tolist()) == (10, [0, 1, -1])
    assert [entry.slot for entry in second.borrowed] == [2]
    second.resume()
    copy = second.slots(FULL)[2]
    assert copy != 2
    assert (manager.buffer(0, "key")[copy, :, :2] == 7.0).all()
    manager.check_integrity()


def test_writing_after_a_partial_match_leaves_the_published_block_alone() -> None:
    manager = manager_of(attention())
    publish(manager, TOKENS[:10])
    manager.buffer(0, "key")[2] = 7.0
    sequence = started(manager, TOKENS[:10])
    sequence.resize(capacity=12)
    manager.buffer(0, "key")[sequence.slots(FULL)[2]] = 5.0
    other = started(manager, [*TOKENS[:10], 90])
    assert (other.reused_tokens, bool((manager.buffer(0, "key")[other.slots(FULL)[2], :, :2] == 7.0).all())) == (
        10,
        True,
    )


def test_same_block_committed_twice_is_kept_once() -> None:
    manager = manager_of(attention(), attention(6))
    first, second = started(manager), started(manager)
    for sequence in (first, second):
        sequence.resize(capacity=8)
    first.commit(TOKENS[:8])
    second.commit(TOKENS[:8])
    assert second.slots(FULL).tolist() == first.slots(FULL).tolist()
    assert (second.slots(WINDOWED).tolist(), manager.usage()[0].held) == (first.slots(WINDOWED).tolist(), 4)
    manager.check_integrity()


def test_tree_gets_the_page_it_has_lost_from_the_next_commit() -> None:
    manager = manager_of(attention(), attention(6), policy="per_request")
    publish(manager, TOKENS[:16])
    assert published_pages(manager, TOKENS[:16], 1) == [0, 0, 4, 4]
    sequence = started(manager)
    sequence.resize(capacity=8)
    sequence.commit(TOKENS[:8])
    assert published_pages(manager, TOKENS[:16], 1) == [4, 4, 4, 4]
    assert manager.probe(TOKENS[:8]) == 8


def test_longer_block_replaces_the_partial_one_it_begins_with() -> None:
    manager = manager_of(attention())
    publish(manager, TOKENS[:6])
    publish(manager, TOKENS[:8])
    assert (manager.usage()[0].cached, manager.probe(TOKENS[:6])) == (2, 6)
    publish(manager, TOKENS[:7])
    assert (manager.usage()[0].cached, len(manager.published.tree)) == (2, 3)


def test_off_policy_publishes_and_matches_nothing() -> None:
    manager = manager_of(attention(), policy="off")
    publish(manager, TOKENS)
    assert (manager.probe(TOKENS), manager.usage()[0].cached) == (0, 0)


def test_probe_has_no_effect_on_what_is_evicted() -> None:
    manager = manager_of(attention())
    publish(manager, TOKENS)
    before = manager.allocators[0].next_victims(9).tolist()
    manager.probe(TOKENS)
    assert manager.allocators[0].next_victims(9).tolist() == before


def test_match_for_a_transfer_takes_whole_blocks() -> None:
    manager = manager_of(attention(), attention(6))
    publish(manager, TOKENS[:10])
    sequence = manager.create_sequence("a", token_ids=TOKENS[:10], for_transfer=True)
    assert (sequence.reused_tokens, sequence.borrowed, manager.probe(TOKENS[:10])) == (8, (), 10)


def test_only_page_of_a_partial_block_is_taken_over_when_there_is_no_room_for_a_copy() -> None:
    manager = manager_of(attention(), slots=3)
    publish(manager, TOKENS[:6])
    other = started(manager)
    other.resize(capacity=4)
    sequence = started(manager, TOKENS[:6])
    assert (sequence.reused_tokens, present(sequence, FULL), free(manager)) == (6, [0, 1], [0])
    assert manager.probe(TOKENS[:6]) == 4
    manager.check_integrity()


def test_resume_without_room_for_the_copy_of_a_shared_block_changes_nothing() -> None:
    manager = manager_of(attention(), slots=2)
    first = serve(manager, TOKENS[:6])
    first.stop_committing()
    sequence = manager.create_sequence("b", token_ids=TOKENS[:6])
    before = books(manager, TOKENS)
    with pytest.raises(CapacityError) as caught:
        sequence.resume()
    assert (caught.value.requested, caught.value.available) == ((1,), (0,))
    assert books(manager, TOKENS) == before
    first.close()
    sequence.resume()
    manager.check_integrity()


def test_commit_without_publishing_pages_that_are_stale_keeps_them_until_history_moves() -> None:
    """per_request publishes only what goes on from the committed length; the other pages stay the sequence's."""
    manager = manager_of(attention(), attention(5), policy="per_request")
    sequence = started(manager)
    sequence.resize(capacity=14)
    sequence.commit(TOKENS[:13])
    assert (present(sequence, FULL), present(sequence, WINDOWED)) == ([0, 1, 2, 3], [2, 3])
    manager.check_integrity()
    sequence.close()
    manager.check_integrity()


def test_tree_that_is_full_stops_publishing_and_commits_go_on() -> None:
    manager = manager_of(attention(1), slots=1, tokens_per_block=1)
    manager.published.tree.max_nodes = 68
    sequence = started(manager)
    for token in range(200):
        sequence.resize(capacity=token + 1)
        sequence.commit([token])
    assert (sequence.committed, len(manager.published.tree) <= 68) == (200, True)
    sequence.close()
    manager.check_integrity()


def test_plan_after_the_last_block_was_absorbed_by_a_longer_one_notes_nothing_of_others() -> None:
    """The node of the partial block is gone, and must not be taken for another that got its number."""
    manager = manager_of(attention(), attention(5))
    first = serve(manager, TOKENS[:6])
    first.stop_committing()
    publish(manager, TOKENS[:8])
    other = list(range(70, 78))
    publish(manager, other)
    first.plan_drop().drop()
    assert [manager.probe(tokens) for tokens in (other[:4], other, TOKENS[:8])] == [4, 8, 8]
    first.close()
    manager.check_integrity()


def test_prompt_is_named_by_the_tokens_it_had_when_it_was_looked_up() -> None:
    """A caller may use its token buffer for the next request."""
    manager = manager_of(attention())
    prompt = np.arange(1, 17, dtype=np.uint32)
    publish(manager, prompt[:10].tolist())
    buffer = prompt.copy()
    sequence = started(manager, buffer[:-1])
    buffer[:] = 777
    sequence.resize(capacity=16)
    sequence.commit(prompt[sequence.committed :])
    sequence.close()
    wrong = np.concatenate([prompt[:8], [777, 777], prompt[10:]])
    assert (manager.probe(prompt), manager.probe(wrong)) == (16, 8)


def test_old_pages_make_room_for_the_nodes_of_new_blocks() -> None:
    manager = manager_of(attention(8), slots=64, policy="per_request")
    manager.published.tree.max_nodes = 120
    for index in range(6):
        tokens = range(1000 * index, 1000 * index + 200)
        sequence = started(manager)
        for end in range(20, 201, 20):
            sequence.resize(capacity=end)
            sequence.resize(history=end)
        sequence.commit(tokens)
        sequence.close()
        assert manager.probe([*tokens, 5]) == 200
        assert len(manager.published.tree) <= 120
    assert manager.probe(range(200)) == 0
    manager.check_integrity()


@pytest.mark.parametrize("broken", ["full", "recurrent"])
def test_priority_function_that_fails_leaves_nothing_behind(broken: str) -> None:
    manager = manager_of(attention(), recurrent(2, 3), slots=16)
    failing = 0 if broken == "full" else 1
    sequence = started(manager, priority=lambda ordinal, life_cycle: 101 if life_cycle == failing else 1)
    sequence.resize(capacity=6)
    with pytest.raises(ConfigError, match="priority is 101"):
        sequence.commit(range(4), snapshot=True)
    manager.check_integrity()
    sequence.resize(history=6)
    with contextlib.suppress(ConfigError):
        sequence.close()
    assert sequence.closed
    manager.check_integrity()
    assert [usage.held for usage in manager.usage()] == [0, 0]


def test_room_for_nodes_is_made_although_one_group_takes_the_pages_of_the_other_along() -> None:
    manager = manager_of(attention(), attention(8, heads=4), slots=64)
    manager.published.tree.max_nodes = 6
    for index in range(4):
        publish(manager, range(100 * index, 100 * index + 16))
    assert manager.probe([*range(300, 316), 5]) == 16
    manager.check_integrity()
