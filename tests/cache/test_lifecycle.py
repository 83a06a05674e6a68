import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import ConfigError
from kvferry.cache.lifecycle import BlockRange, LifeCycle, ceil_div


@pytest.mark.parametrize("prompt_tokens, stale_blocks", [(30, 0), (31, 1), (32, 1), (33, 1), (60, 4), (80, 7)])
def test_stale_range_window_24_block_8_matches_worked_numbers(prompt_tokens: int, stale_blocks: int) -> None:
    assert LifeCycle(24).stale_range(prompt_tokens, 8) == BlockRange(0, stale_blocks)


@pytest.mark.parametrize("prompt_tokens, valid", [(24, 3), (25, 4), (32, 3), (33, 4), (60, 4), (80, 3)])
def test_live_blocks_window_24_block_8_matches_worked_numbers(prompt_tokens: int, valid: int) -> None:
    assert LifeCycle(24).live_blocks(prompt_tokens, prompt_tokens, 8) == valid


def test_stale_range_window_1_at_block_boundary_frees_every_block() -> None:
    assert LifeCycle(1).stale_range(96, 32) == BlockRange(0, 3)


def test_stale_range_sinks_are_kept() -> None:
    assert LifeCycle(64, sink_blocks=1).stale_range(256, 32) == BlockRange(1, 6)


def test_full_attention_never_goes_stale() -> None:
    assert len(LifeCycle().stale_range(10_000, 32)) == 0


@given(
    window=st.integers(1, 70),
    history=st.integers(0, 300),
    tokens_per_block=st.sampled_from([1, 2, 3, 8, 16, 32]),
    sink_blocks=st.integers(0, 3),
)
def test_stale_range_holds_exactly_blocks_no_later_query_reads(
    window: int, history: int, tokens_per_block: int, sink_blocks: int
) -> None:
    stale = LifeCycle(window, sink_blocks).stale_range(history, tokens_per_block)
    for block in range(ceil_div(history + 1, tokens_per_block)):
        last_token = (block + 1) * tokens_per_block - 1
        needed = block < sink_blocks or last_token >= history + 1 - window
        assert (stale.start <= block < stale.end) == (not needed)


@pytest.mark.parametrize("tokens_per_block", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize("headroom", [1, 2, 5, 37])
def test_max_live_blocks_equals_exact_maximum(tokens_per_block: int, headroom: int) -> None:
    for window in [*range(1, 70), 127, 128, 129]:
        life_cycle = LifeCycle(window)
        span = range(3 * window + 3 * tokens_per_block + 2)
        exact = max(life_cycle.live_blocks(history, history + headroom, tokens_per_block) for history in span)
        assert life_cycle.max_live_blocks(headroom, tokens_per_block) == exact


@pytest.mark.parametrize("window, sink_blocks", [(0, 0), (-1, 0), (None, 1), (8, -1)])
def test_life_cycle_impossible_retention_is_refused(window: int | None, sink_blocks: int) -> None:
    with pytest.raises(ConfigError):
        LifeCycle(window, sink_blocks)
