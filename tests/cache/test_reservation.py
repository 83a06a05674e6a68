"""The promise made to a request holds wherever its reused prefix ends, and is not larger than it has to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.layout import CacheLayout
from kvferry.cache.reservation import reserved_slots
from kvferry.cache.sizing import Steps, peak_slots
from tests.cache.specs import layout


def steps_after_reuse(reused: int, prompt: int, chunk: int, total: int) -> Steps:
    """Computing the rest of a prompt chunk by chunk, then decoding one token at a time."""
    starts = np.arange(reused, prompt, chunk, dtype=np.int64)
    ends = np.minimum(starts + chunk, prompt)
    decoding = np.arange(prompt, total, dtype=np.int64)
    history = np.concatenate([starts, [prompt], decoding])
    return Steps(history, np.concatenate([ends, [prompt], decoding + 1]))


windows = st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=4)


@given(
    windows=windows,
    tokens_per_block=st.integers(1, 9),
    prompt=st.integers(1, 120),
    new=st.integers(0, 20),
    chunk=st.integers(1, 60),
    data=st.data(),
)
def test_no_alignment_of_a_reused_prefix_needs_more_than_is_reserved(
    windows: list[int | None], tokens_per_block: int, prompt: int, new: int, chunk: int, data: st.DataObject
) -> None:
    model = layout(windows, tokens_per_block=tokens_per_block)
    reused = data.draw(st.integers(0, prompt - 1))
    total = prompt + new
    held = peak_slots(model, steps_after_reuse(reused, prompt, chunk, total))
    assert all(used <= promised for used, promised in zip(held, reserved_slots(model, total, chunk), strict=True)), (
        "a running sequence would fail for want of a page"
    )


@given(
    windows=windows,
    tokens_per_block=st.integers(1, 9),
    prompt=st.integers(1, 120),
    chunk=st.integers(1, 60),
    rewind=st.integers(0, 5),
    data=st.data(),
)
def test_no_alignment_needs_more_than_is_reserved_with_scratch_pages(
    windows: list[int | None], tokens_per_block: int, prompt: int, chunk: int, rewind: int, data: st.DataObject
) -> None:
    model = layout(windows, tokens_per_block=tokens_per_block)
    steps = steps_after_reuse(data.draw(st.integers(0, prompt - 1)), prompt, chunk, prompt)
    held = peak_slots(model, steps, max_rewind_tokens=rewind)
    promised = reserved_slots(model, prompt, chunk, max_rewind_tokens=rewind)
    assert all(used <= slots for used, slots in zip(held, promised, strict=True))


@pytest.mark.parametrize("window, chunk", [(5, 1), (8, 3), (16, 16), (33, 40)])
def test_some_alignment_needs_all_that_is_reserved(window: int, chunk: int) -> None:
    model = layout([window], tokens_per_block=8)
    total = 400
    peaks = [peak_slots(model, steps_after_reuse(start, total, chunk, total)) for start in range(8)]
    assert max(peaks) == reserved_slots(model, total, chunk)


def test_short_prompts_reserve_what_they_are_long() -> None:
    model: CacheLayout = layout([8, None], tokens_per_block=4)
    assert reserved_slots(model, 5, 512) == (4,)
    assert reserved_slots(model, 100, 1) == (25 + 3,)
