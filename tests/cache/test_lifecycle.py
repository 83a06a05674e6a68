import numpy as np
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


# ---- scratch


@given(
    window=st.one_of(st.none(), st.integers(1, 70)),
    sink_blocks=st.integers(0, 3),
    history=st.integers(0, 200),
    lead=st.integers(0, 200),
    max_rewind=st.integers(0, 40),
    tokens_per_block=st.sampled_from([1, 2, 3, 8, 16, 32]),
)
def test_scratch_range_holds_exactly_new_blocks_that_end_up_stale(
    window: int | None, sink_blocks: int, history: int, lead: int, max_rewind: int, tokens_per_block: int
) -> None:
    life_cycle = LifeCycle(window, sink_blocks if window else 0)
    capacity = history + lead
    scratch = life_cycle.scratch_range(history, capacity, tokens_per_block, max_rewind)
    stale = life_cycle.stale_range(max(0, capacity - max_rewind), tokens_per_block)
    for block in range(ceil_div(capacity, tokens_per_block)):
        is_new = block * tokens_per_block >= history
        expected = is_new and stale.start <= block < stale.end
        assert (scratch.start <= block < scratch.end) == expected
    assert scratch.start <= scratch.end <= max(scratch.start, ceil_div(capacity, tokens_per_block))


def test_scratch_range_of_full_attention_and_recurrent_layers_is_empty() -> None:
    assert not len(LifeCycle().scratch_range(0, 1024, 32))
    assert not len(LifeCycle(recurrent=True).scratch_range(0, 1024, 32))


# ---- recurrent


@pytest.mark.parametrize("history, stale_blocks", [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_stale_range_recurrent_keeps_the_block_of_the_last_token(history: int, stale_blocks: int) -> None:
    assert LifeCycle(recurrent=True).stale_range(history, 8) == BlockRange(0, stale_blocks)


@pytest.mark.parametrize("history, capacity, pages", [(0, 0, 0), (0, 1, 1), (0, 80, 1), (80, 80, 1), (79, 81, 1)])
def test_live_blocks_recurrent_is_one_state(history: int, capacity: int, pages: int) -> None:
    assert LifeCycle(recurrent=True).live_blocks(history, capacity, 8) == pages


def test_max_live_blocks_recurrent_is_one_and_full_attention_has_no_limit() -> None:
    assert LifeCycle(recurrent=True).max_live_blocks(37, 8) == 1
    assert LifeCycle().max_live_blocks(37, 8) is None


def test_only_full_attention_is_full() -> None:
    assert [cycle.full for cycle in (LifeCycle(), LifeCycle(8), LifeCycle(recurrent=True))] == [True, False, False]


# ---- arrays


@given(
    life_cycle=st.one_of(
        st.just(LifeCycle()),
        st.just(LifeCycle(recurrent=True)),
        st.builds(LifeCycle, st.integers(1, 70), st.integers(0, 3)),
    ),
    history=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    lead=st.integers(0, 40),
    tokens_per_block=st.sampled_from([1, 2, 3, 8, 16, 32]),
)
def test_arrays_answer_what_single_sequences_do(
    life_cycle: LifeCycle, history: list[int], lead: int, tokens_per_block: int
) -> None:
    at = np.array(history, np.int64)
    start, end = life_cycle.stale_bounds(at, tokens_per_block)
    singles = [life_cycle.stale_range(h, tokens_per_block) for h in history]
    assert list(zip(start.tolist(), end.tolist(), strict=True)) == singles
    live = life_cycle.live_counts(at, at + lead, tokens_per_block)
    assert live.tolist() == [life_cycle.live_blocks(h, h + lead, tokens_per_block) for h in history]


def test_block_range_clipped() -> None:
    assert BlockRange(2, 9).clipped(5) == BlockRange(2, 5)
    assert BlockRange(7, 9).clipped(5) == BlockRange(5, 5)


@pytest.mark.parametrize(
    "life_cycle, name",
    [
        (LifeCycle(), "full"),
        (LifeCycle(8), "window 8"),
        (LifeCycle(8, 2), "window 8 + 2 sink blocks"),
        (LifeCycle(recurrent=True), "recurrent"),
    ],
)
def test_life_cycle_says_what_it_is(life_cycle: LifeCycle, name: str) -> None:
    assert str(life_cycle) == name


def test_recurrent_life_cycle_with_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="no window"):
        LifeCycle(8, recurrent=True)


@pytest.mark.parametrize("window, sink_blocks", [(0, 0), (-1, 0), (None, 1), (8, -1)])
def test_life_cycle_impossible_retention_is_refused(window: int | None, sink_blocks: int) -> None:
    with pytest.raises(ConfigError):
        LifeCycle(window, sink_blocks)
