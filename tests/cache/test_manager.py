"""Sequences and the manager, by example and against a model that keeps every token's bytes."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.cache.errors import CapacityError, ConfigError, InvariantError, LocalProtocolError
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.layout import build_layout
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.manager import Hold, KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.sizing import decode_steps, peak_slots
from tests.cache.specs import layout, spec

FULL, WINDOWED = LifeCycleId(0), LifeCycleId(1)


def manager_with(windows: list[int | None], num_slots: tuple[int, ...]) -> KVCacheManager:
    return KVCacheManager(layout(windows), num_slots)


def free(manager: KVCacheManager) -> list[int]:
    return [usage.free for usage in manager.usage()]


def test_resize_grows_by_blocks_and_close_gives_everything_back() -> None:
    manager = manager_with([None], (8,))
    sequence = manager.create_sequence("a", (4,))
    sequence.resize(capacity=9)
    assert sequence.slots(FULL).tolist() == [0, 1, 2]
    sequence.resize(capacity=12)
    assert sequence.num_blocks == 3
    manager.check_integrity()
    sequence.close()
    sequence.close()
    assert free(manager) == [8]
    manager.check_integrity()


def test_history_ahead_takes_only_pages_inside_the_window() -> None:
    manager = manager_with([None, 8], (32,))
    sequence = manager.create_sequence("a", (16,))
    sequence.resize(capacity=30, history=30)
    assert sequence.slots(WINDOWED).tolist() == [-1] * 5 + [8, 9, 10]
    assert (sequence.slots(FULL) >= 0).all()
    manager.check_integrity()


def test_gemma3_decode_side_takes_exactly_the_pages_of_the_formula() -> None:
    # Window 512, block 32, 1500 tokens: (1500 + 1 - 512) // 32 = 30 of 47 blocks are stale.
    model = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    manager = KVCacheManager(model, (20, 50))
    sequence = manager.create_sequence("a", peak_slots(model, decode_steps(1500, 32)))
    sequence.resize(capacity=1500, history=1500)
    pages = sequence.pages(1500)
    assert [int((slots >= 0).sum()) for slots in pages.slots] == [17, 47]
    assert [len(slots) for slots in pages.slots] == [47, 47]
    assert np.flatnonzero(pages.slots[0] >= 0).tolist() == list(range(30, 47))
    assert free(manager) == [3, 3]


def test_growing_history_releases_stale_pages_and_their_slots_serve_others() -> None:
    manager = manager_with([8], (4,))
    sequence = manager.create_sequence("a", (4,))
    sequence.resize(capacity=16)
    sequence.resize(history=16)
    assert sequence.slots(FULL).tolist() == [-1, -1, 2, 3]
    # Released and taken in one step: block 4 gets a slot that this very step frees or that is free.
    sequence.resize(history=20, capacity=20)
    assert free(manager) == [2]
    manager.check_integrity()


def test_step_that_frees_and_takes_at_once_needs_no_spare_slot() -> None:
    manager = manager_with([5], (2,))
    sequence = manager.create_sequence("a", (2,))
    sequence.resize(capacity=8)
    sequence.resize(history=8, capacity=12)
    assert sequence.slots(FULL).tolist() == [-1, 1, 0]
    manager.check_integrity()


def test_rewind_drops_trailing_blocks_only() -> None:
    manager = manager_with([None], (8,))
    sequence = manager.create_sequence("a", (8,))
    sequence.resize(capacity=20, history=9)
    sequence.resize(capacity=10)
    assert sequence.slots(FULL).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="below history"):
        sequence.resize(capacity=8)
    assert (sequence.history, sequence.capacity) == (9, 10)


def test_history_cannot_decrease() -> None:
    sequence = manager_with([None], (8,)).create_sequence("a", (8,))
    sequence.resize(capacity=8, history=8)
    with pytest.raises(ConfigError, match="cannot decrease to 7"):
        sequence.resize(history=7)


def test_commit_moves_between_committed_and_history_only() -> None:
    sequence = manager_with([None], (8,)).create_sequence("a", (8,))
    sequence.resize(capacity=8, history=6)
    sequence.commit(5)
    for wrong in (4, 7):
        with pytest.raises(ConfigError, match="commit"):
            sequence.commit(wrong)
    assert sequence.committed == 5


def test_resize_without_enough_slots_changes_nothing() -> None:
    manager = manager_with([None, 8], (9,))
    sequence = manager.create_sequence("a", (9,))
    sequence.resize(capacity=16)
    before = [sequence.slots(FULL).tolist(), sequence.slots(WINDOWED).tolist(), manager.usage()]
    with pytest.raises(CapacityError) as caught:
        sequence.resize(capacity=24)
    assert (caught.value.requested, caught.value.available, caught.value.permanent) == ((4,), (1,), False)
    assert [sequence.slots(FULL).tolist(), sequence.slots(WINDOWED).tolist(), manager.usage()] == before
    manager.check_integrity()


def test_reservations_are_kept_within_the_pools() -> None:
    manager = manager_with([None], (8,))
    first = manager.create_sequence("a", (5,))
    with pytest.raises(CapacityError) as caught:
        manager.create_sequence("b", (4,))
    assert (caught.value.available, caught.value.permanent) == ((3,), False)
    with pytest.raises(CapacityError) as caught:
        manager.create_sequence("c", (9,))
    assert caught.value.permanent
    first.resize(capacity=8)
    assert manager.admissible() == (3,)
    first.close()
    assert manager.admissible() == (8,)


def test_hold_keeps_pages_after_close_until_release() -> None:
    manager = manager_with([None], (4,))
    sequence = manager.create_sequence("a", (4,))
    sequence.resize(capacity=12)
    hold = manager.hold(sequence.pages(12))
    sequence.close()
    assert free(manager) == [1]
    assert manager.admissible() == (1,)
    manager.check_integrity()
    manager.release(hold)
    assert free(manager) == [4]
    with pytest.raises(LocalProtocolError, match="already released"):
        manager.release(hold)


def test_pages_carry_the_epoch_of_this_life() -> None:
    manager = manager_with([None], (2,))
    for life in (1, 2):
        sequence = manager.create_sequence("a", (2,))
        sequence.resize(capacity=5)
        assert [epochs.tolist() for epochs in sequence.pages(5).epochs] == [[life, life]]
        sequence.close()


def test_closed_sequence_refuses_every_call() -> None:
    sequence = manager_with([None], (4,)).create_sequence("a", (4,))
    sequence.close()
    for call in (lambda: sequence.resize(capacity=4), lambda: sequence.commit(0), lambda: sequence.pages(1)):
        with pytest.raises(LocalProtocolError, match="closed"):
            call()


@pytest.mark.parametrize("num_slots", [(), (0,), (4, 4)])
def test_manager_wrong_slot_counts_are_refused(num_slots: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="positive counts"):
        manager_with([None], num_slots)


def test_buffer_views_cover_disjoint_bytes_of_the_pool() -> None:
    manager = manager_with([None, 8], (3,))
    for value, (layer, role) in enumerate([(0, "key"), (0, "value"), (1, "key"), (1, "value")], start=1):
        view = manager.buffer(layer, role)
        assert view.shape == (3, 2, 4, 8)
        # Both layers take slots of one shared pool: layer 0 fills slot 0, layer 1 slot 1.
        view[layer].fill_(float(value))
    pool = manager.storage.pools[0].view(torch.float32).reshape(3, -1)
    assert pool[0].unique().tolist() == [1.0, 2.0]
    assert pool[1].unique().tolist() == [3.0, 4.0]
    assert pool[2].unique().tolist() == [0.0]


def test_pools_larger_than_the_memory_of_the_device_are_refused_before_it_is_touched() -> None:
    with pytest.raises(ConfigError, match=r"the pools need \d+ bytes, cpu has \d+ bytes of memory available"):
        manager_with([None], (1 << 40,))


def test_page_table_addresses_are_those_of_the_pools() -> None:
    manager = manager_with([8, 8, None], (3, 5))
    table = manager.page_table()
    assert [(pool.base, pool.num_slots) for pool in table.pools] == [
        (pool.data_ptr(), count) for pool, count in zip(manager.storage.pools, (3, 5), strict=True)
    ]
    assert [group.pool for group in table.layer_groups] == [0, 1]


def test_check_integrity_tells_a_page_in_two_places() -> None:
    manager = manager_with([None], (4,))
    first, second = (manager.create_sequence(name, (2,)) for name in "ab")
    first.resize(capacity=4)
    second.resize(capacity=4)
    second.slots(FULL)[0] = 0
    with pytest.raises(InvariantError, match="users"):
        manager.check_integrity()


class ManagerMachine(RuleBasedStateMachine):
    """Random life of a few sequences and holds; every page keeps the bytes written to it until it is stale."""

    @initialize(
        windows=st.lists(st.one_of(st.none(), st.integers(1, 14)), min_size=1, max_size=4), quota=st.integers(8, 40)
    )
    def start(self, windows: list[int | None], quota: int) -> None:
        model = layout(windows)
        self.manager = KVCacheManager(model, [quota] * len(model.pool_groups))
        self.sequences: list[SequenceCache] = []
        self.holds: list[tuple[Hold, list[tuple[int, int, int]]]] = []
        self.stamp = 0
        self.bytes: dict[tuple[int, int, int], int] = {}

    def pool_words(self, group: int) -> torch.Tensor:
        size = self.manager.layout.pool_groups[group].slot_bytes
        return self.manager.storage.pools[group].view(-1, size)[:, :8].contiguous().view(torch.int64)

    def write(self, sequence: SequenceCache) -> None:
        """Stamp every page of a sequence with a number of its own."""
        for group in self.manager.layout.life_cycles:
            size = self.manager.layout.pool_groups[group.pool_group].slot_bytes
            pool = self.manager.storage.pools[group.pool_group].view(-1, size)
            for ordinal, slot in enumerate(sequence.slots(group.id).tolist()):
                key = (id(sequence), group.id, ordinal)
                if slot >= 0 and key not in self.bytes:
                    self.stamp += 1
                    self.bytes[key] = self.stamp
                    pool[slot, :8] = torch.tensor([self.stamp]).view(torch.uint8)

    @rule(reserve=st.integers(0, 12))
    def create(self, reserve: int) -> None:
        before = self.manager.usage()
        try:
            sequence = self.manager.create_sequence("s", (reserve,) * len(self.manager.layout.pool_groups))
        except CapacityError:
            assert self.manager.usage() == before
            return
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), grow=st.integers(-8, 24), advance=st.integers(0, 24))
    def resize(self, data: st.DataObject, grow: int, advance: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        cursors = (sequence.history, sequence.capacity)
        tables = [sequence.slots(group.id).tolist() for group in self.manager.layout.life_cycles]
        before = self.manager.usage()
        capacity = max(sequence.history, sequence.capacity + grow)
        history = min(capacity, sequence.history + advance)
        try:
            sequence.resize(capacity=capacity, history=history)
        except CapacityError:
            assert (sequence.history, sequence.capacity) == cursors
            assert [sequence.slots(group.id).tolist() for group in self.manager.layout.life_cycles] == tables
            assert self.manager.usage() == before
            return
        for group in self.manager.layout.life_cycles:
            for ordinal in range(len(sequence.slots(group.id)), 64):
                self.bytes.pop((id(sequence), group.id, ordinal), None)
        self.write(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        pages = sequence.pages(sequence.capacity)
        stamps = [
            (group.pool_group, slot, self.bytes[id(sequence), group.id, ordinal])
            for group in self.manager.layout.life_cycles
            for ordinal, slot in enumerate(sequence.slots(group.id).tolist())
            if slot >= 0
        ]
        self.holds.append((self.manager.hold(pages), stamps))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holds) - 1))
        self.manager.release(self.holds.pop(index)[0])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.bytes = {key: value for key, value in self.bytes.items() if key[0] != id(sequence)}
        sequence.close()

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()
            for usage in self.manager.usage():
                assert usage.free + usage.in_use == usage.num_slots

    @invariant()
    def contents_survive(self) -> None:
        if not hasattr(self, "manager"):
            return
        for sequence in self.sequences:
            for group in self.manager.layout.life_cycles:
                words = self.pool_words(group.pool_group)
                for ordinal, slot in enumerate(sequence.slots(group.id).tolist()):
                    if slot >= 0:
                        assert int(words[slot, 0]) == self.bytes[id(sequence), group.id, ordinal]
        for _, stamps in self.holds:
            for pool, slot, stamp in stamps:
                assert int(self.pool_words(pool)[slot, 0]) == stamp

    @invariant()
    def every_live_block_has_a_page(self) -> None:
        for sequence in getattr(self, "sequences", []):
            p = self.manager.layout.tokens_per_block
            for group in self.manager.layout.life_cycles:
                stale = group.life_cycle.stale_range(sequence.history, p)
                table = sequence.slots(group.id)
                expected = [not stale.start <= o < stale.end for o in range(ceil_div(sequence.capacity, p))]
                assert np.array_equal(table >= 0, expected)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
