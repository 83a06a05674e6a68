"""Rows of the pools specification 5.3. Those of its generations G1 and G3 are recomputed for G2, with the number of
steps in flight given, and say so."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.cursors import (
    ChunkUndo,
    Resize,
    after_step,
    context_capacity,
    decode_start,
    draft_start,
    effective_draft,
    generation_capacity,
    headroom,
    index_rows,
    lookup_tokens,
    max_blocks_per_sequence,
    padded_capacity,
    undone_chunk,
    undone_growth,
)


def test_row_generation_growth_and_update() -> None:
    grown = generation_capacity(100, draft=4)
    assert grown == 105
    assert after_step(grown, 103, draft=4, accepted=2) == Resize(103, 102)


def test_row_default_update() -> None:
    assert after_step(256, 201, draft=3, accepted=0) == Resize(253, 200)


def test_row_dynamic_tree_draft_gives_back_its_own_reserve() -> None:
    target, draft = after_step(256, 200, draft=31, accepted=5), after_step(256, 200, draft=60, accepted=5)
    assert (target.capacity, draft.capacity) == (230, 201)


@pytest.mark.parametrize("accepted, capacity", [(1, 252), (3, 254)])
def test_row_ragged_verify(accepted: int, capacity: int) -> None:
    assert after_step(256, 201, draft=5, accepted=accepted).capacity == capacity


def test_row_completed_request_keeps_its_capacity() -> None:
    assert after_step(256, 201, draft=3, finished=True) == Resize(None, 200)


def test_row_compression_managed_history_moves_capacity_only() -> None:
    assert after_step(256, 201, draft=3, moves_history=False) == Resize(253, None)


def test_row_overlap_slack_recomputed_with_two_steps_in_flight() -> None:
    """G3 grows by 1 + d + d and reads 107. In G2 each of two steps in flight grows by 1 + d: 104, then 108."""
    first = generation_capacity(100, draft=3)
    both = generation_capacity(first, draft=3)
    assert (first, both) == (104, 108)
    after_first = after_step(both, 103, draft=3, accepted=1)
    assert after_first == Resize(106, 102)
    assert after_first.capacity is not None
    assert after_step(after_first.capacity, 105, draft=3, accepted=1) == Resize(104, 104)


def test_row_overlap_slack_four_iterations_recomputed() -> None:
    """G3's 100 + 3n holds in G2 too, with one step in flight: one token and two accepted drafts stay each time."""
    capacity, tokens = 100, 101
    for iteration in range(1, 5):
        tokens += 3
        update = after_step(generation_capacity(capacity, draft=3), tokens, draft=3, accepted=2)
        assert update == Resize(100 + 3 * iteration, 100 + 3 * iteration)
        assert update.capacity is not None
        capacity = update.capacity


def test_row_overlap_slack_revert_recomputed() -> None:
    """G3 grows 100 to 105 with d = 2. G2 with one step in flight grows to 103; both end where they began."""
    grown = generation_capacity(100, draft=2)
    assert grown == 103
    assert undone_growth(grown, 101, draft=2) == 100


def test_row_trim_never_goes_below_the_stored_tokens() -> None:
    assert undone_growth(101, 100, draft=4) == 99
    assert after_step(101, 100, draft=4) == Resize(99, 99)


def test_row_padding_extends_by_the_difference_recomputed() -> None:
    """G3 reads 103, 107, 101; G2 with one step in flight grows by 1 + d: 102, 104, and ends at 101 as well."""
    grown = generation_capacity(100, draft=1)
    padded = padded_capacity(grown, draft=1, padded_draft=3)
    assert (grown, padded) == (102, 104)
    assert after_step(padded, 102, draft=3, accepted=0).capacity == 101


def test_padding_to_a_shorter_draft_changes_nothing() -> None:
    assert padded_capacity(104, draft=3, padded_draft=1) == 104


def test_row_decode_transition_recomputed() -> None:
    """G3 grows 128 to 137 = 1 + 4 + 4. G2 with one step in flight: 1 + 4, that is 133."""
    draft = effective_draft(None, 4)
    assert draft == 4
    assert generation_capacity(128, draft=draft) == 133


def test_row_decode_transition_without_speculation_and_with_drafts_sent() -> None:
    assert effective_draft(None, 4, speculating=False) == 0
    assert effective_draft(2, 4) == 2


def test_row_draft_decode_start() -> None:
    assert draft_start(128, 64, drafts=7, extra=6) == 205


def test_row_context_revert_beyond_the_old_capacity_starts_afresh() -> None:
    assert undone_chunk(64, 256) == ChunkUndo(None, 0)


def test_row_context_revert_keeps_the_cursor() -> None:
    assert undone_chunk(64, 32) == ChunkUndo(Resize(64, 32), 32)


@pytest.mark.parametrize(
    "max_batch, pipeline, overlap, disaggregated, reserved, rows",
    [
        (2, 1, True, False, 1, 5),
        (8, 1, True, False, 1, 17),
        (2, 1, False, False, 1, 3),
        (2, 1, True, True, 1, 5),
        (2, 1, False, True, 1, 5),
        (2, 4, False, False, 1, 9),
        (2, 4, True, False, 1, 9),
        (2, 4, False, True, 1, 17),
        (2, 1, True, False, 5, 9),
    ],
)
def test_row_index_rows(
    max_batch: int, pipeline: int, overlap: bool, disaggregated: bool, reserved: int, rows: int
) -> None:
    found = index_rows(max_batch, pipeline=pipeline, overlap=overlap, disaggregated=disaggregated, reserved=reserved)
    assert found == rows


def test_max_blocks_per_sequence_recomputed_with_the_headroom() -> None:
    """G1 adds e + reserve + 1 = 8 for PARD with K = 4; G2 adds its headroom 11: 129 blocks, rounded up to 132."""
    assert max_blocks_per_sequence(4096, 32, headroom=headroom(3, 7)) == 132


@pytest.mark.parametrize(
    "extra, draft, steps_in_flight, expected",
    [(0, 0, 1, 1), (3, 4, 1, 8), (3, 7, 1, 11), (3, 7, 2, 19), (11, 12, 2, 37), (0, 4, 1, 5)],
    ids=["none", "K4", "PARD-K4", "PARD-K4-two-steps", "MTP-K12-two-steps", "shared-KV-K4"],
)
def test_headroom_of_speculative_modes(extra: int, draft: int, steps_in_flight: int, expected: int) -> None:
    assert headroom(extra, draft, steps_in_flight) == expected


def test_without_speculation_cursors_move_token_by_token() -> None:
    """A prompt of 10 in chunks of 4, then two new tokens: what a plain serving loop asks for."""
    assert [context_capacity(start, start, min(4, 10 - start)) for start in (0, 4, 8)] == [4, 8, 10]
    assert decode_start(0, 10) == Resize(10, 10)
    assert generation_capacity(10) == 11
    assert after_step(11, 12) == Resize(11, 11)


@pytest.mark.parametrize("capacity, expected", [(0, 15), (64, 64)])
def test_context_and_decode_start_never_shrink(capacity: int, expected: int) -> None:
    assert context_capacity(capacity, 8, 4, extra=3) == expected
    assert decode_start(capacity, 10, drafts=2, extra=3) == Resize(expected, 10)


@given(
    prompt=st.integers(1, 100),
    extra=st.integers(0, 6),
    draft=st.integers(0, 8),
    steps_in_flight=st.integers(1, 3),
    data=st.data(),
)
def test_lead_reaches_the_headroom_and_never_exceeds_it(
    prompt: int, extra: int, draft: int, steps_in_flight: int, data: st.DataObject
) -> None:
    """A loop that keeps n steps in flight: each grows when it starts and gives back when its result is known."""
    accepted = data.draw(st.lists(st.integers(0, draft), min_size=steps_in_flight, max_size=30))
    start = decode_start(0, prompt, extra=extra)
    assert start.capacity is not None
    capacity, history, tokens = start.capacity, prompt, prompt + 1
    in_flight: deque[int] = deque()
    leads = []
    for step in accepted:
        capacity = generation_capacity(capacity, draft=draft)
        in_flight.append(step)
        leads.append(capacity - history)
        if len(in_flight) == steps_in_flight:
            settled = in_flight.popleft()
            tokens += 1 + settled
            update = after_step(capacity, tokens, draft=draft, accepted=settled)
            assert update.capacity is not None
            assert update.history is not None
            capacity, history = update.capacity, update.history
    assert max(leads) == headroom(extra, draft, steps_in_flight)
    assert capacity - history == extra + len(in_flight) * (1 + draft)


@pytest.mark.parametrize("limit, looked_up", [(None, 65), (64, 65), (63, 64)])
def test_row_5_3_evidence_for_a_prompt_of_65_tokens(limit: int | None, looked_up: int) -> None:
    assert lookup_tokens(65, limit, match_backoff=1) == looked_up
