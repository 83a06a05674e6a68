import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import sizing
from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import CacheLayout, build_layout, build_static_layout
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.spec import from_transformers_config
from tests.cache.specs import attention, layout, model, recurrent, spec

MODELS = Path(__file__).parents[2] / "benchmarks/models"
windows_lists = st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=6)


@given(windows_lists, st.integers(1, 200), st.integers(1, 64), st.integers(1, 40))
def test_live_blocks_vectorised_equals_the_life_cycle(
    windows: list[int | None], prompt: int, chunk: int, new_tokens: int
) -> None:
    steps = sizing.prefill_steps(prompt, chunk) + sizing.decode_steps(prompt, new_tokens)
    for life_cycle in (*map(LifeCycle, windows), LifeCycle(recurrent=True)):
        expected = [
            life_cycle.live_blocks(int(h), int(c), 4) for h, c in zip(steps.history, steps.capacity, strict=True)
        ]
        assert sizing.live_blocks(life_cycle, steps, 4).tolist() == expected


def test_decode_steps_store_all_tokens_but_the_last() -> None:
    steps = sizing.decode_steps(10, 4)
    assert steps.history.tolist() == [10, 10, 11, 12]
    assert steps.capacity.tolist() == [10, 11, 12, 13]


def test_decode_steps_single_token_stores_the_prompt_only() -> None:
    assert sizing.decode_steps(10, 1).capacity.tolist() == [10, 10]


def test_prefill_steps_end_with_the_whole_prompt_as_history() -> None:
    steps = sizing.prefill_steps(10, 4)
    assert list(zip(steps.history.tolist(), steps.capacity.tolist(), strict=True)) == [
        (0, 4),
        (4, 8),
        (8, 10),
        (10, 10),
    ]


# ---- what sequences hold


def test_peak_slots_gemma3_decode_of_1500_tokens() -> None:
    # Window 512, block 32: ceil((512 + 1 - 2) / 32) + 1 = 17 pages; full attention ceil(1531 / 32) = 48.
    gemma = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    assert sizing.peak_slots(gemma, sizing.decode_steps(1500, 32)) == (17, 48)


def test_peak_slots_recurrent_state_is_one_slot() -> None:
    hybrid = build_layout(model(recurrent(4), attention()), tokens_per_block=4)
    assert sizing.peak_slots(hybrid, sizing.prefill_steps(40, 8)) == (1, 10)


@given(
    window=st.integers(1, 70),
    sink_tokens=st.integers(0, 9),
    tokens_per_block=st.sampled_from([1, 2, 3, 8, 16]),
    prompt=st.integers(0, 60),
)
def test_peak_slots_of_a_long_decode_is_the_floor(
    window: int, sink_tokens: int, tokens_per_block: int, prompt: int
) -> None:
    """Run-time need equals the static floor: a sequence that passes every alignment reaches the bound with lead 1."""
    windowed = build_layout(model(attention(window, sink_tokens=sink_tokens)), tokens_per_block=tokens_per_block)
    steps = sizing.decode_steps(prompt, window + sink_tokens + 4 * tokens_per_block)
    assert sizing.peak_slots(windowed, steps) == sizing.slot_floors(windowed)


@given(
    window=st.integers(1, 70),
    tokens_per_block=st.sampled_from([1, 2, 3, 8, 16]),
    prompt=st.integers(1, 400),
    chunk=st.integers(1, 100),
    new_tokens=st.integers(1, 40),
)
def test_peak_slots_stay_within_the_bound_of_the_longest_lead(
    window: int, tokens_per_block: int, prompt: int, chunk: int, new_tokens: int
) -> None:
    windowed = build_layout(model(attention(window)), tokens_per_block=tokens_per_block)
    steps = sizing.prefill_steps(prompt, chunk) + sizing.decode_steps(prompt, new_tokens)
    bound = LifeCycle(window).max_live_blocks(max(1, min(chunk, prompt)), tokens_per_block)
    assert bound is not None
    assert sizing.peak_slots(windowed, steps)[0] <= bound


def test_slot_floors_count_the_straddled_block() -> None:
    assert sizing.slot_floors(layout([32] * 2 + [None], tokens_per_block=32)) == (2, 2)
    assert sizing.slot_floors(layout([128, None], tokens_per_block=32)) == (10,)


def test_slot_floors_recurrent_and_sinks() -> None:
    hybrid = build_layout(
        model(recurrent(3), attention(128, sink_tokens=1), attention(), attention()), tokens_per_block=32
    )
    assert sizing.slot_floors(hybrid) == (1, 6, 6)


# ---- scratch (pools specification 5.4)


@pytest.mark.parametrize(
    "window, sink_blocks, history, capacity, rewind, expected",
    [
        (32, 0, 0, 256, 0, (0, 7)),
        (32, 0, 0, 256, 64, (0, 5)),
        (64, 0, 0, 256, 0, (0, 6)),
        (64, 0, 0, 256, 32, (0, 5)),
        (64, 0, 256, 352, 0, (8, 9)),
        (64, 0, 256, 352, 32, None),
        (128, 1, 0, 512, 0, (1, 12)),
        (128, 0, 0, 1024, 0, (0, 28)),
    ],
)
def test_vector_5_4_scratch_ranges(
    window: int, sink_blocks: int, history: int, capacity: int, rewind: int, expected: tuple[int, int] | None
) -> None:
    found = LifeCycle(window, sink_blocks).scratch_range(history, capacity, 32, rewind)
    assert (tuple(found) if len(found) else None) == expected


def test_vector_5_4_scratch_eleven_blocks_take_one_slot_of_sixteen_sub_pages() -> None:
    layers = build_layout(model(*[attention(128, sink_tokens=1)] * 16), tokens_per_block=32)
    assert sizing.scratch_slots(layers.life_cycles[0], np.array([0, 1, 11, 16, 17])).tolist() == [0, 1, 1, 1, 2]


def test_vector_5_4_scratch_prefill_of_1024_tokens_takes_5_slots_instead_of_32() -> None:
    layers = build_layout(spec([128] * 32), tokens_per_block=32)
    steps = sizing.prefill_steps(1024, 1024)
    assert sizing.peak_slots(layers, steps) == (32,)
    assert sizing.peak_slots(layers, steps, max_rewind_tokens=0) == (5,)


@given(
    window=st.integers(1, 40),
    sink_blocks=st.integers(0, 2),
    tokens_per_block=st.sampled_from([1, 2, 3, 8]),
    cursors=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), min_size=1, max_size=8),
    rewind=st.integers(0, 20),
)
def test_scratch_counts_vectorised_equal_the_life_cycle(
    window: int, sink_blocks: int, tokens_per_block: int, cursors: list[tuple[int, int]], rewind: int
) -> None:
    life_cycle = LifeCycle(window, sink_blocks)
    history = np.array([h for h, _ in cursors], np.int64)
    steps = sizing.Steps(history, history + np.array([lead for _, lead in cursors], np.int64))
    found = sizing.scratch_counts(life_cycle, steps, tokens_per_block, rewind)
    expected = [len(life_cycle.scratch_range(h, h + lead, tokens_per_block, rewind)) for h, lead in cursors]
    assert found.tolist() == expected
    assert (found <= sizing.live_blocks(life_cycle, steps, tokens_per_block)).all()


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 80), st.integers(0, 20))
def test_peak_slots_scratch_never_costs_more(window: int, prompt: int, chunk: int, rewind: int) -> None:
    layers = build_layout(spec([window] * 3 + [None]), tokens_per_block=4)
    steps = sizing.prefill_steps(prompt, chunk)
    with_scratch = sizing.peak_slots(layers, steps, max_rewind_tokens=rewind)
    assert all(a <= b for a, b in zip(with_scratch, sizing.peak_slots(layers, steps), strict=True))


# ---- what a budget gives


@given(windows_lists, st.integers(0, 1 << 22), st.data())
def test_divide_quota_spends_no_more_than_the_rounded_quota_and_keeps_floors(
    windows: list[int | None], quota: int, data: st.DataObject
) -> None:
    pools = layout(windows)
    groups = len(pools.pool_groups)
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=groups, max_size=groups))
    floors = sizing.slot_floors(pools)
    needed = sum(-(-n * group.slot_bytes // 512) for n, group in zip(floors, pools.pool_groups, strict=True))
    if -(-quota // 512) < needed:
        with pytest.raises(ConfigError, match="raise the quota"):
            sizing.divide_quota(pools, quota, weights, grain_bytes=512)
        raised = sizing.divide_quota(pools, quota, weights, grain_bytes=512, raise_quota_to_floor=True)
        assert all(count >= floor for count, floor in zip(raised, floors, strict=True))
        return
    slots = sizing.divide_quota(pools, quota, weights, grain_bytes=512)
    spent = sum(-(-count * group.slot_bytes // 512) for count, group in zip(slots, pools.pool_groups, strict=True))
    assert spent <= -(-quota // 512)
    assert all(count >= floor for count, floor in zip(slots, floors, strict=True))


def test_divide_quota_weights_share_the_bytes() -> None:
    gemma = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    slots = sizing.divide_quota(gemma, 1 << 26, (1.0, 3.0))
    used = [count * group.slot_bytes for count, group in zip(slots, gemma.pool_groups, strict=True)]
    assert used[1] / used[0] == pytest.approx(3.0, rel=0.01)


def test_divide_quota_given_floors_win_over_weights() -> None:
    pools = layout([8, 8, None])
    slots = sizing.divide_quota(pools, 1 << 20, (1e-6, 1.0), floors=(500, 5))
    assert slots[0] == 500


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, 1.0, 1.0)])
def test_divide_quota_bad_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="pool weights"):
        sizing.divide_quota(layout([8, 8, None]), 1 << 20, weights)


def test_divide_quota_below_the_floor_says_the_numbers() -> None:
    with pytest.raises(ConfigError, match="pool quota is 4096 bytes"):
        sizing.divide_quota(layout([512, None]), 4096, (1.0,))


def test_step_weights_fill_all_groups_together() -> None:
    gemma = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    steps = sizing.decode_steps(4096, 1)
    slots = sizing.divide_quota(gemma, 1 << 28, sizing.step_weights(gemma, steps))
    requests = np.asarray(slots) / np.asarray(sizing.peak_slots(gemma, steps))
    assert requests.max() / requests.min() == pytest.approx(1.0, rel=0.02)


# ---- full use of memory (pools specification 5.4)


def half_windowed(num_layers: int) -> CacheLayout:
    """Layers that alternate window 128 with one sink token and full attention, 32 768 bytes per key and value block."""
    pair = (attention(128, heads=2, head_dim=128, sink_tokens=1), attention(heads=2, head_dim=128))
    return build_layout(model(*pair * (num_layers // 2)), tokens_per_block=32)


def test_vector_5_4_full_use_of_memory_32_mib_hold_704_tokens_and_not_705() -> None:
    """28 slots are 1 sink, 5 window and 22 full-attention blocks: 704 tokens at any alignment."""
    pools = half_windowed(36)
    assert [group.slot_bytes for group in pools.pool_groups] == [1_179_648]
    slots = sizing.divide_quota(pools, 32 << 20, (1.0,), grain_bytes=2 << 20)
    assert slots == (28,)
    assert sizing.peak_slots(pools, sizing.decode_steps(1, 704))[0] <= 28
    assert sizing.peak_slots(pools, sizing.decode_steps(1, 705))[0] == 29
    assert sizing.clamp_max_seq_len(pools, slots, 1, 4096) == 704


def test_vector_5_4_odd_quota_is_rounded_up_to_grains() -> None:
    """5 619 712 bytes are not whole grains of 2 MiB: three are taken, so the pools hold no less than was asked for."""
    pools = half_windowed(8)
    slots = sizing.divide_quota(pools, 5_619_712, (1.0,), grain_bytes=2 << 20)
    assert slots == (24,)
    assert slots[0] * pools.pool_groups[0].slot_bytes >= 5_619_712


# ---- clamp (pools specification 5.4: block 32, slots of 2 MiB, as many slots as layers, but no less than the floors)


@pytest.mark.parametrize(
    "windows, batch, upper, expected",
    [
        ([None], 1, 0, 0),
        ([None], 1, 32, 32),
        ([None], 1, 64, 32),
        ([None], 2, 64, 0),
        ([None], 3, 64, 0),
        ([32], 1, 96, 96),
        ([32, None], 1, 96, 64),
        ([32, None], 2, 96, 32),
    ],
)
def test_vector_5_4_clamp(windows: list[int | None], batch: int, upper: int, expected: int) -> None:
    """[32, None] with (1, 96) is published as 96, which forgets the block the window straddles: from 64 to 94 tokens of
    history it holds 2 blocks beside the 3 of full attention, and there are 4 slots. So 64 is right."""
    pools = build_layout(spec(windows, heads=2, head_dim=4096), tokens_per_block=32)
    assert [group.slot_bytes for group in pools.pool_groups] == [2 << 20]
    slots = sizing.divide_quota(pools, len(windows) << 21, (1.0,), grain_bytes=2 << 20, raise_quota_to_floor=True)
    assert slots == (max(len(windows), sizing.slot_floors(pools)[0]),)
    assert sizing.clamp_max_seq_len(pools, slots, batch, upper) == expected


@given(windows_lists, st.integers(1, 4), st.integers(1, 600), st.integers(1, 5), st.integers(1, 120))
def test_clamp_is_what_a_growing_sequence_can_reach(
    windows: list[int | None], batch: int, upper: int, headroom: int, scale: int
) -> None:
    pools = layout(windows)
    slots = [scale] * len(pools.pool_groups)
    length = sizing.clamp_max_seq_len(pools, slots, batch, upper, headroom=headroom)
    assert 0 <= length <= upper
    assert length == upper or length % 4 == 0
    if length:
        capacity = np.arange(1, length + 1)
        steps = sizing.Steps(np.maximum(0, capacity - headroom), capacity)
        peaks = sizing.peak_slots(pools, steps)
        one = sizing.peak_slots(pools, sizing.Steps(np.array([0]), np.array([1])))
        assert all(p + (batch - 1) * o <= n for p, o, n in zip(peaks, one, slots, strict=True))


def test_clamp_headroom_takes_room_from_the_sequence() -> None:
    pools = layout([8, None])
    assert sizing.clamp_max_seq_len(pools, [20], 1, 4096, headroom=1) == 17 * 4
    assert sizing.clamp_max_seq_len(pools, [20], 1, 4096, headroom=9) == 15 * 4


# ---- static shares


def static(windows: list[int | None]) -> CacheLayout:
    return build_static_layout(spec(windows), tokens_per_block=32)


def test_static_slots_equal_shares_by_default() -> None:
    pools = static([512] * 5 + [None])
    sizes = [group.slot_bytes for group in pools.pool_groups]
    assert sizing.static_slots(pools, 1 << 26) == tuple((1 << 25) // size for size in sizes)


def test_static_slots_given_shares() -> None:
    pools = static([512] * 5 + [None])
    sizes = [group.slot_bytes for group in pools.pool_groups]
    assert sizing.static_slots(pools, 1 << 26, (0.75, 0.25)) == (3 * (1 << 24) // sizes[0], (1 << 24) // sizes[1])


def test_static_slots_thirds_sum_to_one_within_float_rounding() -> None:
    pools = static([8, 16, None])
    quota = 3 * 8192 * 100
    assert sizing.static_slots(pools, quota, (1 / 3, 1 / 3, 1 / 3)) == sizing.static_slots(pools, quota)


@pytest.mark.parametrize(
    "shares, message",
    [
        ((1.0,), "need 2 positive numbers"),
        ((0.5, 0.25, 0.25), "need 2 positive numbers"),
        ((1.0, 0.0), "need 2 positive numbers"),
        ((1.5, -0.5), "need 2 positive numbers"),
        ((float("nan"), 0.5), "need 2 positive numbers"),
        ((0.5, 0.4), "sum to 0.9"),
    ],
)
def test_static_slots_bad_shares_are_refused(shares: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sizing.static_slots(static([512, None]), 1 << 24, shares)


def test_static_slots_below_a_floor_says_the_numbers() -> None:
    pools = static([128, None])
    size = pools.pool_groups[0].slot_bytes
    with pytest.raises(ConfigError) as refused:
        sizing.static_slots(pools, 20 * size, (0.2, 0.8))
    for number in (f"{20 * size} bytes", "[4, 16]", "[5, 5]"):
        assert number in str(refused.value)
    assert sizing.static_slots(pools, 20 * size, (0.25, 0.75)) == (5, 15)


def hybrid_pools() -> CacheLayout:
    return build_static_layout(model(attention(16), recurrent(1024), attention()), tokens_per_block=32)


def test_static_slots_states_share_like_any_pool_without_a_number() -> None:
    sizes = [group.slot_bytes for group in hybrid_pools().pool_groups]
    assert sizes == [4096, 4096, 4096]
    assert sizing.static_slots(hybrid_pools(), 30 * 4096) == (10, 10, 10)


def test_static_slots_given_number_of_states_is_taken_first() -> None:
    assert sizing.static_slots(hybrid_pools(), 30 * 4096, num_states=4) == (13, 4, 13)
    assert sizing.static_slots(hybrid_pools(), 30 * 4096, (0.25, 0.75), num_states=2) == (7, 2, 21)


@pytest.mark.parametrize("num_states, message", [(0, "num_states is 0"), (40, "163840 bytes of it for recurrent")])
def test_static_slots_impossible_number_of_states_is_refused(num_states: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sizing.static_slots(hybrid_pools(), 30 * 4096, num_states=num_states)


def test_static_slots_states_of_a_model_without_recurrent_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="no recurrent layers"):
        sizing.static_slots(static([None]), 1 << 24, num_states=4)


def test_static_slots_only_states() -> None:
    pools = build_static_layout(model(recurrent(1024)), tokens_per_block=32)
    assert sizing.static_slots(pools, 10 * 4096, num_states=4) == (4,)
    assert sizing.static_slots(pools, 10 * 4096) == (10,)


# ---- capacity of real models: requests in steady decode, block 32, headroom 1


@pytest.mark.parametrize(
    "name, tokens, ratio",
    [
        ("gpt-oss-120b", 8192, 1.9),
        ("gemma-3-27b", 8192, 1.15),
        ("gemma-3-27b", 32768, 1.65),
        ("llama-3-70b", 8192, 0.999),
    ],
)
def test_shared_pools_hold_more_requests_than_equal_static_shares(name: str, tokens: int, ratio: float) -> None:
    described = from_transformers_config(json.loads((MODELS / f"{name}.json").read_text()))
    shared, equal = build_layout(described), build_static_layout(described)
    steps = sizing.decode_steps(tokens - 64, 64)
    quota = 256 << 30
    v2 = sizing.divide_quota(shared, quota, sizing.step_weights(shared, steps))
    v1 = sizing.static_slots(equal, quota)
    held = [
        min(n / peak for n, peak in zip(slots, sizing.peak_slots(pools, steps), strict=True))
        for pools, slots in ((shared, v2), (equal, v1))
    ]
    assert held[0] / held[1] >= ratio
