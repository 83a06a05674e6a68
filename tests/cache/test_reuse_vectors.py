"""Reuse, windows and memory of running managers, row by row as the pools specification lists them (5.3 and 5.4)."""

import pytest

from kvferry.cache.admission import PoolOptions
from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.errors import CapacityError, ConfigError, LocalProtocolError
from kvferry.cache.ids import LayerId, LifeCycleId
from kvferry.cache.layout import build_layout
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceState
from kvferry.cache.sizing import divide_quota
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec
from tests.cache.serving import free, manager_of, present, publish, published_pages, serve, started
from tests.cache.specs import attention

FULL, WINDOWED = LifeCycleId(0), LifeCycleId(1)


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


# ---- 5.3: commit, chunks, context revert, growth


def test_commit_context_end_at_10_publishes_tokens_4_to_9_and_stops() -> None:
    manager = manager_of(attention())
    sequence = started(manager)
    sequence.resize(capacity=10)
    sequence.commit(tokens(4))
    assert manager.probe(tokens(10)) == 4
    sequence.commit(tokens(6, 4))
    sequence.stop_committing()
    assert (sequence.committed, manager.probe(tokens(10)), manager.probe(tokens(11))) == (10, 10, 10)
    sequence.resize(capacity=12)
    sequence.commit([10, 11])
    assert (sequence.committed, manager.probe(tokens(12))) == (12, 10)


@pytest.mark.parametrize("ends", [[12], [4, 12], [4, 9, 12], [7, 12], [11, 12]])
@pytest.mark.parametrize("window", [None, 3, 7])
def test_chunking_does_not_change_the_published_keys(ends: list[int], window: int | None) -> None:
    manager = manager_of(attention(window))
    sequence = started(manager)
    for end in ends:
        sequence.resize(capacity=end)
        sequence.commit(tokens(end - sequence.committed, sequence.committed))
    sequence.close()
    names = {manager.published.tree.key(node) for node in manager.published.tree.nodes().tolist()}
    assert names == {ReuseScope().key, *manager.block_keys(tokens(12))}
    assert manager.probe(tokens(12)) == 12


def test_context_revert_within_the_old_capacity_gives_back_exactly_what_was_grown() -> None:
    manager = manager_of(attention(), tokens_per_block=32)
    sequence = started(manager)
    sequence.resize(capacity=64, history=32)
    before = (free(manager), present(sequence, FULL))
    sequence.resize(capacity=256)
    sequence.resize(capacity=64, history=32)
    sequence.suspend()
    assert (free(manager), present(sequence, FULL)) == before
    assert (sequence.history, sequence.capacity) == (32, 64)


def test_context_revert_of_a_history_beyond_the_old_capacity_frees_everything() -> None:
    manager = manager_of(attention(), tokens_per_block=32)
    sequence = started(manager)
    sequence.resize(capacity=64)
    sequence.resize(capacity=256, history=256)
    with pytest.raises(ConfigError, match="history 256 cannot decrease to 64"):
        sequence.resize(capacity=64, history=64)
    sequence.close()
    assert free(manager) == [32]


def test_generation_growth_100_to_105_and_back_to_103_with_history_102() -> None:
    manager = manager_of(attention(), tokens_per_block=32)
    sequence = started(manager)
    sequence.resize(capacity=100, history=99)
    sequence.resize(capacity=105)
    assert present(sequence, FULL) == [0, 1, 2, 3]
    sequence.resize(capacity=103, history=102)
    assert (sequence.capacity, sequence.history) == (103, 102)
    sequence.resize(history=103)
    assert (sequence.capacity, sequence.history) == (103, 103)


def test_suspended_sequence_is_not_grown() -> None:
    sequence = manager_of(attention()).create_sequence("s")
    with pytest.raises(LocalProtocolError, match="suspended"):
        sequence.resize(capacity=4)
    assert sequence.capacity == 0


def test_sequence_without_room_for_its_prompt_can_be_suspended_and_tried_again() -> None:
    """The decode-init row: growth fails, the sequence waits, and grows once another one has gone."""
    manager = manager_of(attention(), tokens_per_block=32, slots=7)
    other = started(manager)
    other.resize(capacity=64)
    waiting = started(manager)
    with pytest.raises(CapacityError) as caught:
        waiting.resize(capacity=205, history=128)
    assert (caught.value.requested, caught.value.available, caught.value.permanent) == ((7,), (5,), False)
    waiting.suspend()
    other.close()
    waiting.resume()
    waiting.resize(capacity=205, history=128)
    assert free(manager) == [0]


# ---- 5.4: resume gate


def test_resume_gate_looks_at_each_pool_group_not_at_the_whole() -> None:
    """One group is above 0.9, all together far below: the resume is refused."""
    layout = build_layout(ModelSpec("test", "float32", (_layer(0, None, 2), _layer(1, 4, 4))), tokens_per_block=4)
    manager = KVCacheManager(layout, [10, 100], options=PoolOptions(max_util_for_resume=0.9))
    waiting = manager.create_sequence("waiting")
    busy = started(manager)
    busy.resize(capacity=36, history=35)
    waiting.resume()
    waiting.suspend()
    busy.resize(capacity=40)
    with pytest.raises(CapacityError, match=r"others hold 10 of 10 slots of pool group 0, more than .* 0.9"):
        waiting.resume()
    assert waiting.state is SequenceState.SUSPENDED
    assert sum(usage.held for usage in manager.usage()) < 0.2 * 110
    busy.resize(capacity=36)
    waiting.resume()


def test_resume_gate_does_not_count_what_can_be_evicted_nor_the_own_pages() -> None:
    manager = manager_of(attention(), slots=4, max_util_for_resume=0.5)
    publish(manager, tokens(8))
    sequence = started(manager)
    sequence.resize(capacity=16)
    sequence.suspend()
    sequence.resume()
    assert sequence.state is SequenceState.ACTIVE


def _layer(layer_id: int, window: int | None, heads: int) -> LayerSpec:
    return LayerSpec(LayerId(layer_id), window, (BufferSpec("key", heads, 8), BufferSpec("value", heads, 8)))


# ---- 5.4: minimal snapshot, backoff, planned drops


@pytest.mark.parametrize("policy", ["per_request", "per_conversation"])
def test_min_snapshot_keeps_the_last_two_of_four_window_pages(policy: str) -> None:
    manager = manager_of(attention(64), tokens_per_block=32, policy=policy)
    publish(manager, tokens(128))
    assert published_pages(manager, tokens(128), 0) == [0, 0, 32, 32]
    assert (manager.probe(tokens(128)), manager.probe(tokens(96))) == (128, 0)
    manager.check_integrity()


def test_without_min_snapshot_every_window_page_is_kept() -> None:
    manager = manager_of(attention(64), tokens_per_block=32)
    publish(manager, tokens(128))
    assert published_pages(manager, tokens(128), 0) == [32] * 4
    assert manager.probe(tokens(96)) == 96


def test_backoff_3_of_32_tokens_matches_29_and_of_2_none() -> None:
    manager = manager_of(attention(), tokens_per_block=8, match_backoff_tokens=3)
    publish(manager, tokens(32))
    assert (manager.probe(tokens(32)), manager.probe(tokens(2))) == (29, 0)
    sequence = started(manager, tokens(32))
    assert (sequence.reused_tokens, sequence.num_blocks) == (29, 4)
    # The last block holds 5 tokens that count: it is a copy.
    assert sequence.slots(FULL)[3] not in manager.published.tree.pages[manager.published.tree.nodes()]


@pytest.fixture(params=[0, 1])
def two_plans(request: pytest.FixtureRequest):
    """Long 24 and short 8, its prefix, both planned (p 8, w 8), and the backoff."""
    backoff: int = request.param
    manager = manager_of(attention(), attention(8), tokens_per_block=8, match_backoff_tokens=backoff)
    long = serve(manager, tokens(24))
    long.stop_committing()
    short = started(manager)
    short.resize(capacity=8)
    short.commit(tokens(8))
    short.stop_committing()
    plans = long.plan_drop(), short.plan_drop()
    long.close()
    short.close()
    yield manager, plans[0], plans[1], backoff
    manager.check_integrity()


def test_planned_drop_changes_nothing_until_it_is_done(two_plans) -> None:
    manager, _, _, backoff = two_plans
    assert manager.probe(tokens(8)) == 8 - backoff
    assert manager.probe(tokens(24)) == 24 - backoff


def test_planned_drop_of_the_short_one_leaves_the_long_one(two_plans) -> None:
    manager, _, short, backoff = two_plans
    short.drop()
    assert (manager.probe(tokens(8)), manager.probe(tokens(24))) == (0, 24 - backoff)


def test_planned_drop_of_the_long_one_leaves_16_tokens_for_any_backoff(two_plans) -> None:
    manager, long, _, _ = two_plans
    long.drop()
    # Full attention keeps all 24 tokens; the window pages allow 16.
    assert manager.probe(tokens(24)) == 16
    assert published_pages(manager, tokens(24), 0) == [8, 8, 8]


def test_planned_drop_of_both_leaves_what_neither_noted(two_plans) -> None:
    manager, long, short, _ = two_plans
    short.drop()
    long.drop()
    assert published_pages(manager, tokens(24), 1) == [0, 8, 0]
    assert manager.probe(tokens(24)) == 16


def test_planned_drop_twice_raises(two_plans) -> None:
    _, long, _, _ = two_plans
    long.drop()
    with pytest.raises(LocalProtocolError, match="dropped before"):
        long.drop()


def test_planned_drop_spares_pages_in_use() -> None:
    manager = manager_of(attention(8), tokens_per_block=8)
    sequence = serve(manager, tokens(16))
    sequence.plan_drop().drop()
    assert manager.probe(tokens(16)) == 16


def test_planned_drop_of_nothing_published_raises() -> None:
    sequence = started(manager_of(attention()))
    with pytest.raises(LocalProtocolError, match="published nothing"):
        sequence.plan_drop()


def test_conversation_drops_the_older_turn_by_itself() -> None:
    manager = manager_of(attention(), attention(5), policy="per_conversation")
    first, second = tokens(12), tokens(24)
    publish(manager, first)
    assert (manager.probe(first), published_pages(manager, first, 1)) == (12, [0, 0, 4])
    publish(manager, second)
    # The window pages of the first turn are gone, its full-attention pages serve the second.
    assert published_pages(manager, second, 1) == [0, 0, 0, 0, 0, 4]
    assert (manager.probe(first), manager.probe(second)) == (0, 24)
    publish(manager, tokens(30))
    assert (manager.probe(second), manager.probe(tokens(30))) == (0, 30)


def test_conversation_that_branches_drops_the_common_turn_once() -> None:
    manager = manager_of(attention(), attention(5), policy="per_conversation")
    publish(manager, tokens(12))
    branches = [tokens(12) + [100 + n] * 12 for n in range(2)]
    for branch in branches:
        publish(manager, branch)
    assert [manager.probe(branch) for branch in branches] == [24, 24]
    assert manager.probe(tokens(12)) == 0


def test_per_request_policy_keeps_older_turns() -> None:
    manager = manager_of(attention(), attention(5), policy="per_request")
    publish(manager, tokens(12))
    publish(manager, tokens(24))
    assert (manager.probe(tokens(12)), manager.probe(tokens(24))) == (12, 24)


# ---- 5.4: partial coverage (block 32, one windowed and one full life cycle, minimal snapshots)


def covered(*windows: int, **options: int) -> KVCacheManager:
    return manager_of(
        *[attention(w) for w in windows], attention(), tokens_per_block=32, policy="per_request", **options
    )


def leave(manager: KVCacheManager, count: int) -> None:
    """Compute from nothing and commit once, at the end."""
    sequence = started(manager)
    sequence.resize(capacity=count)
    sequence.commit(tokens(count))
    sequence.close()
    manager.check_integrity()


def coverage(manager: KVCacheManager, ordinal: int) -> tuple[int, int]:
    """Tokens that the pages of a block of a 160-token prompt hold: full attention, window."""
    return published_pages(manager, tokens(160), 1)[ordinal], published_pages(manager, tokens(160), 0)[ordinal]


def test_partial_coverage_80_then_160_keeps_the_shorter_window_page() -> None:
    manager = covered(33)
    leave(manager, 80)
    assert manager.probe(tokens(80)) == 80
    leave(manager, 160)
    assert (manager.probe(tokens(80)), manager.probe(tokens(160))) == (80, 160)
    assert coverage(manager, 2) == (32, 16)


def test_partial_coverage_160_then_80_is_the_same() -> None:
    manager = covered(33)
    leave(manager, 160)
    leave(manager, 80)
    assert (manager.probe(tokens(80)), manager.probe(tokens(160))) == (80, 160)
    assert coverage(manager, 2) == (32, 16)


def test_partial_coverage_88_after_80_grows_and_never_shrinks() -> None:
    manager = covered(33)
    leave(manager, 160)
    for count, expected in [(80, 16), (88, 24), (80, 24)]:
        leave(manager, count)
        assert coverage(manager, 2) == (32, expected)
        assert manager.probe(tokens(count)) == count


def test_partial_coverage_window_1_at_96_needs_no_page_at_all() -> None:
    manager = covered(1)
    leave(manager, 96)
    assert (published_pages(manager, tokens(96), 0), manager.probe(tokens(96))) == ([0, 0, 0], 96)


def test_partial_coverage_window_33_backoff_1_falls_back_to_the_48_token_base() -> None:
    """Windows are not widened by the backoff here: who needs that declares them wider."""
    manager = covered(33, match_backoff_tokens=1)
    leave(manager, 48)
    leave(manager, 96)
    assert published_pages(manager, tokens(96), 0) == [32, 16, 32]
    assert manager.probe(tokens(96)) == 48


# ---- 5.4: scopes


@pytest.mark.parametrize(
    "other", [ReuseScope(7, 12), ReuseScope(8, 11), ReuseScope(7, None), ReuseScope(None, 11), ReuseScope()]
)
def test_reuse_scope_is_invisible_to_others(other: ReuseScope) -> None:
    manager = manager_of(attention())
    publish(manager, tokens(12), scope=ReuseScope(7, 11))
    assert manager.probe(tokens(12), ReuseScope(7, 11)) == 12
    assert manager.probe(tokens(12), other) == 0
    publish(manager, tokens(8), scope=other)
    assert (manager.probe(tokens(12), ReuseScope(7, 11)), manager.probe(tokens(12), other)) == (12, 8)


# ---- 5.4: memory


def test_full_use_of_memory_704_tokens_fit_and_705_raise() -> None:
    """36 layers, 28 slots of 1,179,648 bytes: 1 sink, 5 window and 22 full-attention blocks are 704 tokens.

    There is no host tier, so the suspended twin of the row, which would be moved out, is left out.
    """
    layers = [_wide(index, 128, 1) for index in range(18)] + [_wide(index, None, 0) for index in range(18, 36)]
    layout = build_layout(ModelSpec("test", "bfloat16", tuple(layers)), tokens_per_block=32)
    (slots,) = divide_quota(layout, 32 << 20, [1.0], grain_bytes=4 << 20)
    assert ([group.slot_bytes for group in layout.pool_groups], slots) == ([1_179_648], 28)
    manager = KVCacheManager(layout, [slots])
    sequence = started(manager)
    for history in range(0, 704, 32):
        sequence.resize(capacity=history + 32, history=history)
    sequence.resize(history=702)
    assert (len(present(sequence, WINDOWED)), len(present(sequence, FULL)), free(manager)) == (22, 6, [0])
    with pytest.raises(CapacityError) as caught:
        sequence.resize(capacity=705, history=704)
    assert (caught.value.requested, caught.value.available) == ((2,), (1,))
    assert (sequence.capacity, sequence.history) == (704, 702)


def _wide(index: int, window: int | None, sinks: int) -> LayerSpec:
    """K and V of 32,768 bytes per block of 32 tokens."""
    buffers = (BufferSpec("key", 4, 128), BufferSpec("value", 4, 128))
    return LayerSpec(LayerId(index), window, buffers, sink_tokens=sinks)


@pytest.mark.parametrize("windows", [[None], [None, 64]])
def test_constraint_of_32_requests_of_one_token_at_0_95_all_resume(windows: list[int | None]) -> None:
    layout = build_layout(ModelSpec("t", "float32", tuple(_layer(i, w, 1) for i, w in enumerate(windows))))
    slots = [ceil_div(32 * len(group.life_cycles) * 100, 95) for group in layout.pool_groups]
    manager = KVCacheManager(layout, slots, options=PoolOptions(max_util_for_resume=0.95))
    sequences = [manager.create_sequence(str(index)) for index in range(32)]
    for sequence in sequences:
        sequence.resume()
        sequence.resize(capacity=1)
    for sequence in sequences:
        sequence.suspend()
    for sequence in sequences:
        sequence.resume()
    assert all(sequence.state is SequenceState.ACTIVE for sequence in sequences)
    manager.check_integrity()


@pytest.mark.parametrize("system", [0, 64, 50, 256])
def test_system_prompt_is_shared_by_four_sequences_of_512_tokens(system: int) -> None:
    """Four sequences run in exactly the slots that sharing the full blocks of the system prompt leaves them with."""
    shared = system // 32
    manager = manager_of(attention(heads=1), tokens_per_block=32, slots=shared + 4 * (16 - shared) + (system % 32 > 0))
    prompt = tokens(system)
    if system:
        publish(manager, prompt)
    sequences = []
    for index in range(4):
        sequence = started(manager, prompt)
        assert sequence.reused_tokens == system
        sequence.resize(capacity=512)
        sequence.commit([1000 + index] * (512 - system))
        sequences.append(sequence)
    first = [sequence.slots(FULL)[:shared].tolist() for sequence in sequences]
    assert first == first[:1] * 4
    assert manager.usage()[0].held == shared + 4 * (16 - shared)
    manager.check_integrity()
