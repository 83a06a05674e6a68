import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import sizing
from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import build_layout
from kvferry.cache.lifecycle import LifeCycle
from tests.cache.specs import layout, spec

windows_lists = st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=6)


@given(windows_lists, st.integers(1, 200), st.integers(1, 64), st.integers(1, 40))
def test_live_blocks_vectorised_equals_the_life_cycle(
    windows: list[int | None], prompt: int, chunk: int, new_tokens: int
) -> None:
    steps = sizing.prefill_steps(prompt, chunk) + sizing.decode_steps(prompt, new_tokens)
    for window in windows:
        life_cycle = LifeCycle(window)
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


def test_slot_floors_count_the_straddled_block() -> None:
    assert sizing.slot_floors(layout([32] * 2 + [None], tokens_per_block=32)) == (2, 2)
    assert sizing.slot_floors(layout([128, None], tokens_per_block=32)) == (10,)


@given(windows_lists, st.integers(0, 1 << 22), st.data())
def test_divide_quota_spends_no_more_than_the_quota_and_keeps_floors(
    windows: list[int | None], quota: int, data: st.DataObject
) -> None:
    model = layout(windows)
    groups = len(model.pool_groups)
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=groups, max_size=groups))
    floors = sizing.slot_floors(model)
    needed = sum(-(-n * group.slot_bytes // 512) for n, group in zip(floors, model.pool_groups, strict=True))
    if quota // 512 < needed:
        with pytest.raises(ConfigError, match="raise the quota"):
            sizing.divide_quota(model, quota, weights, grain_bytes=512)
        return
    slots = sizing.divide_quota(model, quota, weights, grain_bytes=512)
    spent = sum(
        -(-count * group.slot_bytes // 512) * 512 for count, group in zip(slots, model.pool_groups, strict=True)
    )
    assert spent <= quota
    assert all(count >= floor for count, floor in zip(slots, floors, strict=True))


def test_divide_quota_weights_share_the_bytes() -> None:
    model = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    slots = sizing.divide_quota(model, 1 << 26, (1.0, 3.0))
    used = [count * group.slot_bytes for count, group in zip(slots, model.pool_groups, strict=True)]
    assert used[1] / used[0] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, 1.0, 1.0)])
def test_divide_quota_bad_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="pool weights"):
        sizing.divide_quota(layout([8, 8, None]), 1 << 20, weights)


def test_divide_quota_below_the_floor_says_the_numbers() -> None:
    with pytest.raises(ConfigError, match="pool quota is 4096 bytes"):
        sizing.divide_quota(layout([512, None]), 4096, (1.0,))


def test_peak_slots_gemma3_decode_of_1500_tokens() -> None:
    # Window 512, block 32: ceil((512 + 1 - 2) / 32) + 1 = 17 pages; full attention ceil(1531 / 32) = 48.
    model = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    assert sizing.peak_slots(model, sizing.decode_steps(1500, 32)) == (17, 48)


def test_step_weights_fill_all_groups_together() -> None:
    model = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    steps = sizing.decode_steps(4096, 1)
    slots = sizing.divide_quota(model, 1 << 28, sizing.step_weights(model, steps))
    requests = np.asarray(slots) / np.asarray(sizing.peak_slots(model, steps))
    assert requests.max() / requests.min() == pytest.approx(1.0, rel=0.02)
