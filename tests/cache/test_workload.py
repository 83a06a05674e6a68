import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import CacheLayout, build_layout
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.sizing import Steps, divide_quota, peak_slots, slot_floors
from kvferry.cache.workload import (
    FALLBACK_BATCH,
    Batch,
    ServingLimits,
    Workload,
    batch_slots,
    serving_workload,
    size_pools,
    slots_bytes,
    slots_with_resume_room,
    workload_floors,
    workload_weights,
)
from tests.cache.specs import attention, layout, model, recurrent, spec

GRAIN = 2 << 20


def two_groups() -> CacheLayout:
    """Slots of 768 KiB (window 128, sink of 32 tokens) and 1280 KiB (full attention), block 32."""
    windowed, full = attention(128, heads=1, head_dim=1024, sink_tokens=32), attention(heads=1, head_dim=1024)
    pools = build_layout(model(*[windowed] * 3, *[full] * 5), tokens_per_block=32)
    assert [group.slot_bytes for group in pools.pool_groups] == [768 << 10, 1280 << 10]
    return pools


def weights(workload: Workload) -> tuple[float, ...]:
    return workload_weights(two_groups(), workload, grain_bytes=GRAIN)


# ---- slots of a batch (pools specification 3.4)


def test_batch_slots_one_request_is_what_it_holds() -> None:
    pools = layout([8] * 2 + [None])
    # Windows of 8 at history 20: blocks 3 and 4 and 5; 24 tokens are 6 blocks.
    assert batch_slots(pools, Batch.of([(24, 20)])) == (3, 6)


def test_vector_5_4_slots_of_a_hybrid_batch_count_the_empty_request_too() -> None:
    hybrid = build_layout(model(recurrent(3), attention()), tokens_per_block=32)
    assert batch_slots(hybrid, Batch.of([(64, 63), (0, 0)])) == (2, 2)


def test_batch_slots_empty_batch_needs_nothing() -> None:
    assert batch_slots(layout([8] * 2 + [None]), Batch.of([], shared_tokens=100)) == (0, 0)


@pytest.mark.parametrize("shared_tokens, expected", [(0, (20, 64)), (64, (20, 58)), (50, (20, 61)), (256, (20, 40))])
def test_vector_5_4_system_prompt_is_stored_once(shared_tokens: int, expected: tuple[int, int]) -> None:
    """Four requests of 512 tokens that decode: their windows have left the prompt behind, full attention shares it."""
    pools = build_layout(spec([128] * 3 + [None] * 2), tokens_per_block=32)
    assert batch_slots(pools, Batch.of([(512, 511)] * 4, shared_tokens)) == (16, expected[1])
    assert batch_slots(pools, Batch.of([(512, 511)] * 4, shared_tokens), any_alignment=True) == expected


def test_batch_slots_shared_block_stays_until_every_window_has_left_it() -> None:
    pools = layout([8])
    gone, still = (24, 20), (8, 4)
    # 20 tokens of history leave 3 blocks live; 4 leave 2, which are the two shared ones.
    assert batch_slots(pools, Batch.of([gone, gone], shared_tokens=8)) == (6,)
    assert batch_slots(pools, Batch.of([gone, still], shared_tokens=8)) == (5,)


def test_batch_slots_scratch_blocks_share_slots() -> None:
    pools = build_layout(spec([128] * 32), tokens_per_block=32)
    assert batch_slots(pools, Batch.of([(1024, 0)] * 2)) == (64,)
    assert batch_slots(pools, Batch.of([(1024, 0)] * 2), max_rewind_tokens=0) == (10,)


def test_batch_slots_scratch_spares_the_shared_prompt() -> None:
    pools = build_layout(spec([128] * 32), tokens_per_block=32)
    # 28 of 32 blocks would be scratch, but 8 of them are shared: stored once, beside 1 + 4 of each request.
    assert batch_slots(pools, Batch.of([(1024, 0)] * 2, 256), max_rewind_tokens=0) == (18,)


cursors = st.tuples(st.integers(0, 120), st.integers(0, 40)).map(lambda pair: (sum(pair), pair[0]))
windows_lists = st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=4)


@given(windows_lists, cursors, st.one_of(st.none(), st.integers(0, 20)))
def test_batch_of_one_equals_the_peak_of_its_step(
    windows: list[int | None], request_: tuple[int, int], rewind: int | None
) -> None:
    pools = layout(windows)
    batch = Batch.of([request_])
    assert batch_slots(pools, batch, max_rewind_tokens=rewind) == peak_slots(
        pools, batch.steps, max_rewind_tokens=rewind
    )


@given(windows_lists, st.lists(cursors, min_size=1, max_size=5), st.integers(0, 80))
def test_batch_slots_shared_prompt_equals_counting_pages_one_by_one(
    windows: list[int | None], requests: list[tuple[int, int]], shared_tokens: int
) -> None:
    requests = [(capacity + shared_tokens, history) for capacity, history in requests]
    pools = layout(windows)
    needs = []
    for member in pools.life_cycles:
        pages: set[tuple[int, int]] = set()
        for index, (capacity, history) in enumerate(requests):
            stale = member.life_cycle.stale_range(history, 4)
            for block in range(-(-capacity // 4)):
                if not stale.start <= block < stale.end:
                    pages.add((-1 if block < shared_tokens // 4 else index, block))
        needs.append(len(pages))
    counted = tuple(sum(needs[index] for index in group.life_cycles) for group in pools.pool_groups)
    found = batch_slots(pools, Batch.of(requests, shared_tokens))
    # Sharing is charged from all requests' common stale blocks, so it is exact with equal sinks.
    assert found == counted


@given(windows_lists, st.lists(cursors, max_size=4), st.integers(0, 60))
def test_batch_slots_at_any_alignment_covers_this_one(
    windows: list[int | None], requests: list[tuple[int, int]], shared_tokens: int
) -> None:
    pools, batch = layout(windows), Batch.of(requests, shared_tokens)
    loose = batch_slots(pools, batch, any_alignment=True)
    assert all(a >= b for a, b in zip(loose, batch_slots(pools, batch), strict=True))


@pytest.mark.parametrize("requests, shared_tokens", [([(3, 4)], 0), ([(3, -1)], 0), ([(3, 3)], -1)])
def test_batch_impossible_cursors_are_refused(requests: list[tuple[int, int]], shared_tokens: int) -> None:
    with pytest.raises(ConfigError, match="batch"):
        Batch.of(requests, shared_tokens)


# ---- weights and their precedence (pools specification 3.3 and 5.4)


def test_vector_5_4_ratio_fallback_gives_the_window_less() -> None:
    window, full = weights(Workload())
    assert window < full
    assert weights(Workload(typical=FALLBACK_BATCH)) == (window, full)


def test_vector_5_4_ratio_short_requests() -> None:
    window, full = weights(Workload(typical=Batch.of([(64, 32)] * 64)))
    assert window / full == pytest.approx(0.6, abs=0.15)


def test_vector_5_4_ratio_long_requests() -> None:
    window, _ = weights(Workload(typical=Batch.of([(4096, 4000)] * 32)))
    assert window < 0.15


def share_of_window(workload: Workload, quota_bytes: int) -> float:
    used = slots_bytes(two_groups(), size_pools(two_groups(), quota_bytes, workload, grain_bytes=GRAIN))
    return used[0] / sum(used)


def test_vector_5_4_ratio_constraint_of_256_requests_raises_the_window() -> None:
    typical, constraint = Batch.of([(4096, 4000)] * 32), Batch.of([(256, 128)] * 256)
    alone = share_of_window(Workload(typical=typical), 6 << 30)
    assert share_of_window(Workload(typical=typical, constraints=(constraint,)), 6 << 30) > max(0.2, alone)


def test_vector_5_4_ratio_shared_group_takes_all() -> None:
    shared = layout([128, None], tokens_per_block=32)
    assert len(shared.pool_groups) == 1
    assert workload_weights(shared, Workload(ratio=(0.25, 0.75))) == (1.0,)


def test_vector_5_4_ratio_explicit_gives_way_to_a_constraint_of_256_requests() -> None:
    """The share of full attention rises above its 0.2, because the floors of the batch win."""
    workload = Workload(ratio=(0.8, 0.2), constraints=(Batch.of([(256, 128)] * 256),))
    assert weights(workload) == pytest.approx((0.8, 0.2))
    assert 1 - share_of_window(workload, 6 << 30) > 0.2
    slots = size_pools(two_groups(), 6 << 30, workload, grain_bytes=GRAIN)
    assert slots[1] == 2048


def test_weights_take_the_ratio_before_typical_before_constraints() -> None:
    typical, constraint = Batch.of([(4096, 4000)]), Batch.of([(64, 32)] * 64)
    everything = Workload(ratio=(0.5, 0.5), typical=typical, constraints=(constraint,))
    assert weights(everything) == (0.5, 0.5)
    without_ratio = Workload(typical=typical, constraints=(constraint,))
    assert weights(without_ratio) == weights(Workload(typical=typical))
    floors = slots_bytes(
        two_groups(), workload_floors(two_groups(), Workload(constraints=(constraint,))), grain_bytes=GRAIN
    )
    assert weights(Workload(constraints=(constraint,))) == tuple(part / sum(floors) for part in floors)


def test_prefill_chunk_is_a_floor_and_leaves_the_weights() -> None:
    workload = Workload(prefill_tokens=8192)
    assert weights(workload) == weights(Workload())
    assert workload_floors(two_groups(), workload) == (256, 256)


def test_prefill_chunk_with_scratch_needs_few_windowed_slots() -> None:
    pools = build_layout(spec([128] * 32 + [None]), tokens_per_block=32)
    workload = Workload(prefill_tokens=8192, max_rewind_tokens=0)
    # 252 of 256 blocks are scratch in 32 sub-pages: 8 slots, and 4 for the window.
    assert workload_floors(pools, workload) == (12, 256)


def test_weights_charge_the_straddled_block() -> None:
    pools = layout([8, 8, None])
    aligned = Batch.of([(24, 23)])
    assert batch_slots(pools, aligned) == (2, 6)
    assert workload_weights(pools, Workload(typical=aligned), grain_bytes=1) == (6 / 12, 6 / 12)


@pytest.mark.parametrize(
    "ratio, message",
    [
        ((1.0,), r"pool ratio \[1.0\]: need 2 positive numbers, one per life cycle"),
        ((0.5, 0.25, 0.25), "need 2"),
        ((1.0, 0.0), "need 2 positive"),
        ((1.5, -0.5), "need 2 positive"),
        ((math.nan, 1.0), "nan"),
        ((math.inf, 1.0), "inf"),
        ((0.5, 0.6), r"sum to 1.1: they must sum to 1.0"),
    ],
)
def test_weights_bad_ratio_is_refused(ratio: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weights(Workload(ratio=ratio))


def test_ratio_has_one_share_per_life_cycle_also_where_groups_are_fewer() -> None:
    shared = layout([128, None], tokens_per_block=32)
    with pytest.raises(ConfigError, match="need 2 positive numbers, one per life cycle"):
        workload_weights(shared, Workload(ratio=(1.0,)))


# ---- floors (pools specification 3.5)


@pytest.mark.parametrize(
    "num_slots, max_util, expected",
    [(1168, 0.95, 1230), (1104, 0.95, 1163), (950, 0.95, 1000), (32, 0.95, 34), (7, 1.0, 7), (1, 0.5, 2), (9, 0.9, 10)],
)
def test_resume_room_is_the_least_that_passes_the_gate(num_slots: int, max_util: float, expected: int) -> None:
    assert slots_with_resume_room(num_slots, max_util) == expected


@given(st.integers(1, 100_000), st.floats(0.01, 1.0))
def test_resume_room_is_tight(num_slots: int, max_util: float) -> None:
    total = slots_with_resume_room(num_slots, max_util)
    assert num_slots / total <= max_util
    assert total == num_slots or num_slots / (total - 1) > max_util


def test_vector_5_4_constraint_of_32_single_tokens_leaves_room_for_the_gate() -> None:
    workload = Workload(constraints=(Batch.of([(1, 0)] * 32),), max_util_for_resume=0.95)
    assert workload_floors(two_groups(), workload) == (34, 34)


def test_vector_5_4_rounding_two_slots_of_almost_one_grain_give_2_and_3() -> None:
    """A slot of one grain less 256 bytes for the window, as near to a grain as whole values of 32 tokens come."""
    pools = build_layout(
        model(attention(32, heads=1, head_dim=8191), attention(heads=1, head_dim=8192)), tokens_per_block=32
    )
    assert [group.slot_bytes for group in pools.pool_groups] == [GRAIN - 256, GRAIN]
    workload = Workload(constraints=(Batch.of([(32, 0)]),))
    assert size_pools(pools, 5 * GRAIN, workload, grain_bytes=GRAIN) == (2, 3)


def test_vector_5_1_external_draft_fits_at_every_length() -> None:
    """PARD, K = 4, headroom 11: one context of 512 + 3 tokens beside 63 that generate, at 1024 to 1055 of history."""
    pools = build_layout(spec([504]), tokens_per_block=32)
    assert [LifeCycle(504).max_live_blocks(headroom, 32) for headroom in (11, 8)] == [18, 17]
    needs = [batch_slots(pools, Batch.of([(515, 0)] + [(h + 11, h)] * 63)) for h in range(1024, 1056)]
    assert max(needs) <= batch_slots(pools, Batch.of([(515, 0)] + [(1035, 1024)] * 63), any_alignment=True)
    assert max(needs) == (17 + 63 * 18,)
    assert max(needs)[0] <= 1168


def test_floors_cover_one_sequence_when_nothing_is_known() -> None:
    assert workload_floors(two_groups(), Workload()) == slot_floors(two_groups())


@pytest.mark.parametrize("max_util", [0.0, -0.5, 1.01, math.nan])
def test_workload_impossible_resume_limit_is_refused(max_util: float) -> None:
    with pytest.raises(ConfigError, match="max_util_for_resume"):
        Workload(max_util_for_resume=max_util)


def test_size_pools_quota_below_a_constraint_is_refused_or_raised() -> None:
    workload = Workload(ratio=(0.5, 0.5), constraints=(Batch.of([(256, 128)] * 256),))
    with pytest.raises(ConfigError, match=r"at least \[2048, 2048\] slots"):
        size_pools(two_groups(), 1 << 30, workload)
    raised = size_pools(two_groups(), 1 << 30, workload, raise_quota_to_floor=True)
    assert raised == (2048, 2048)


def test_size_pools_without_constraints_divides_by_the_weights() -> None:
    workload = Workload(typical=Batch.of([(4096, 4000)] * 32))
    assert size_pools(two_groups(), 4 << 30, workload, grain_bytes=GRAIN) == divide_quota(
        two_groups(), 4 << 30, weights(workload), grain_bytes=GRAIN
    )


# ---- the serving loop (pools specification 5.3, first row)


def test_row_serving_typical_and_constraints() -> None:
    limits = ServingLimits(3, 1024, 2048, draft_tokens=2, average_tokens=1024)
    workload = serving_workload(limits)
    assert workload.typical == Batch.of([(2048, 0), (1024, 1021), (1024, 1021)])
    assert workload.must_fit == (Batch.of([(1024, 1023), (3, 0), (3, 0)]), Batch.of([(2048, 0)]))


def test_row_serving_average_256() -> None:
    workload = serving_workload(ServingLimits(3, 1024, 2048, draft_tokens=2, average_tokens=256))
    assert workload.typical == Batch.of([(2048, 0), (256, 253), (256, 253)])


def test_row_serving_extra_tokens_lengthen_the_chunk() -> None:
    limits = ServingLimits(3, 1024, 256, draft_tokens=2, extra_tokens=2, average_tokens=264)
    workload = serving_workload(limits)
    assert workload.typical is not None
    assert workload.typical.requests[0] == (258, 0)
    assert workload.must_fit[-1] == Batch.of([(258, 0)])


def test_row_serving_average_above_the_greatest_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="average_tokens is 1025, above max_seq_len_tokens 1024"):
        serving_workload(ServingLimits(3, 1024, 2048, average_tokens=1025))


@pytest.mark.parametrize("extra_tokens, chunk", [(0, 2048), (4, 2052)])
def test_row_serving_without_average_still_guarantees_a_chunk(extra_tokens: int, chunk: int) -> None:
    """The newer form: no typical batch, one constraint."""
    workload = serving_workload(ServingLimits(3, 1024, 2048, extra_tokens=extra_tokens))
    assert workload.typical is None
    assert workload.must_fit == (Batch.of([(chunk, 0)]),)


def test_row_serving_given_ratio_keeps_the_constraints() -> None:
    """Older code dropped typical batch and constraints beside a ratio, and with them all floors. Here the ratio decides
    the weights alone, and what must fit still fits."""
    limits = ServingLimits(3, 1024, 2048, draft_tokens=2, average_tokens=1024)
    workload = serving_workload(limits, ratio=(1.0,))
    assert workload_weights(layout([None]), workload) == (1.0,)
    assert len(workload.must_fit) == 2


def test_steps_of_a_batch_are_its_cursors() -> None:
    steps: Steps = Batch.of([(5, 3), (0, 0)]).steps
    assert (steps.capacity.tolist(), steps.history.tolist()) == ([5, 0], [3, 0])
