"""The bound of live pages against the exact maximum, over a whole grid. Source: pools specification 3.7 and 3.12."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.lifecycle import LifeCycle

BLOCKS = (1, 2, 3, 8, 16, 32, 64, 128)
WINDOWS = (*range(1, 140), 255, 256, 257, 504, 511, 512, 513)
HEADROOMS = (0, 1, 2, 3, 5, 8, 11, 20, 36, 37)


def exact_maximum(life_cycle: LifeCycle, headroom: int, tokens_per_block: int) -> int:
    """The most pages held at any history: from the window and the sinks on, it repeats with the block."""
    assert life_cycle.window is not None
    settled = life_cycle.window + (life_cycle.sink_blocks + 2) * tokens_per_block
    history = np.arange(settled + tokens_per_block, dtype=np.int64)
    return int(life_cycle.live_counts(history, history + headroom, tokens_per_block).max())


def bounds(tokens_per_block: int, headroom: int) -> npt.NDArray[np.int64]:
    """The bound for each of WINDOWS."""
    return np.array([LifeCycle(window).max_live_blocks(headroom, tokens_per_block) for window in WINDOWS])


@pytest.mark.parametrize("tokens_per_block", BLOCKS)
def test_tight_bound_equals_the_exact_maximum(tokens_per_block: int) -> None:
    wrong = [
        (window, headroom)
        for window in WINDOWS
        for headroom in HEADROOMS
        if LifeCycle(window).max_live_blocks(headroom, tokens_per_block)
        != exact_maximum(LifeCycle(window), headroom, tokens_per_block)
    ]
    assert not wrong


@pytest.mark.parametrize("sink_blocks", [1, 2, 3])
@pytest.mark.parametrize("tokens_per_block", BLOCKS)
def test_tight_bound_with_sinks_is_attained(tokens_per_block: int, sink_blocks: int) -> None:
    for window in (1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 129, 504):
        for headroom in HEADROOMS:
            life_cycle = LifeCycle(window, sink_blocks)
            exact = exact_maximum(life_cycle, headroom, tokens_per_block)
            assert life_cycle.max_live_blocks(headroom, tokens_per_block) == exact, (window, headroom)


@given(
    window=st.integers(1, 600),
    sink_blocks=st.integers(0, 3),
    tokens_per_block=st.sampled_from(BLOCKS),
    headroom=st.integers(0, 40),
    data=st.data(),
)
def test_tight_bound_covers_every_shorter_lead(
    window: int, sink_blocks: int, tokens_per_block: int, headroom: int, data: st.DataObject
) -> None:
    history = data.draw(st.integers(0, 5000))
    lead = data.draw(st.integers(0, headroom))
    life_cycle = LifeCycle(window, sink_blocks)
    bound = life_cycle.max_live_blocks(headroom, tokens_per_block)
    assert bound is not None
    assert life_cycle.live_blocks(history, history + lead, tokens_per_block) <= bound


def test_simpler_bounds_are_wrong_as_often_as_the_specification_says() -> None:
    """Why neither ceil(w / p) nor ceil((w + H - 1) / p) + 1 is used: short, and too large when p divides w + H - 2."""
    windows = np.array(WINDOWS)
    short: dict[int, int] = {}
    excess: dict[int, int] = {}
    for block in BLOCKS:
        for headroom in HEADROOMS[1:]:
            exact = bounds(block, headroom)
            for value in (exact - -(-windows // block)).tolist():
                short[min(value, 3)] = short.get(min(value, 3), 0) + 1
            for value in (-(-(windows + headroom - 1) // block) + 1 - exact).tolist():
                excess[value] = excess.get(value, 0) + 1
    assert short == {0: 316, 1: 5085, 2: 1905, 3: 3206}
    assert excess == {0: 7772, 1: 2740}
