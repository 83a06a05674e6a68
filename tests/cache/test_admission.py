"""Who is let in, with numbers; and what an operator may set."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.admission import PoolOptions, StallWatch
from kvferry.cache.errors import CapacityError, ConfigError
from kvferry.cache.holds import Access
from kvferry.cache.layout import build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sizing import decode_steps, peak_slots, prefill_steps, slot_floors
from tests.cache.serving import free, manager_of, publish, serve
from tests.cache.specs import attention, model, recurrent


@pytest.mark.parametrize(
    "options, why",
    [
        ({"commit_policy": "always"}, "commit_policy is 'always'"),
        ({"max_util_for_resume": 0.0}, "above 0"),
        ({"max_util_for_resume": -0.5}, "above 0"),
        ({"max_util_for_resume": 1.01}, "at most 1"),
        ({"max_util_for_resume": math.nan}, "nan"),
        ({"max_sequences": 0}, "at least one"),
        ({"match_backoff_tokens": -1}, "match_backoff_tokens is -1"),
        ({"max_rewind_tokens": -1}, "max_rewind_tokens is -1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PoolOptions(**options)


def test_request_beyond_the_pools_is_refused_for_good() -> None:
    manager = manager_of(attention(), slots=8)
    verdict = manager.fits_ever((9,))
    assert (verdict.admitted, verdict.permanent, verdict.requested, verdict.available) == (False, True, (9,), (8,))
    with pytest.raises(CapacityError, match=r"needs \[9\] slots per pool group, the pools have \[8\]") as caught:
        manager.create_sequence("big", (9,))
    assert caught.value.permanent
    assert manager.fits_ever((8,)).admitted


def test_reservations_are_kept_within_the_pools() -> None:
    manager = manager_of(attention(), slots=8)
    first = manager.create_sequence("a", (5,))
    with pytest.raises(CapacityError, match=r"\[3\] are not spoken for") as caught:
        manager.create_sequence("b", (4,))
    assert (caught.value.requested, caught.value.available, caught.value.permanent) == ((4,), (3,), False)
    first.resume()
    first.resize(capacity=8)
    assert (manager.unpromised(), manager.usage()[0].reserved) == ((3,), 5)
    first.close()
    assert (manager.unpromised(), manager.usage()[0].reserved) == ((8,), 0)


def test_cached_pages_do_not_stand_in_the_way_of_admission() -> None:
    manager = manager_of(attention(), slots=8)
    publish(manager, list(range(32)))
    assert free(manager) == [0]
    assert manager.can_admit((8,)).admitted


def test_pages_of_sequences_without_a_reservation_count_as_promised() -> None:
    manager = manager_of(attention(), slots=8)
    serve(manager, list(range(12)))
    assert manager.unpromised() == (5,)


def test_pages_that_only_transfers_keep_count_as_promised() -> None:
    manager = manager_of(attention(), slots=8)
    sequence = serve(manager, list(range(12)))
    hold = manager.hold(sequence.pages(12), Access.READ)
    sequence.close()
    assert (manager.unpromised(), manager.can_admit((6,)).reason) == (
        (5,),
        "needs [6] slots per pool group, [5] are not spoken for: retry after a release",
    )
    manager.release(hold)
    assert manager.unpromised() == (8,)


def test_cap_on_open_sequences_is_independent_of_memory() -> None:
    manager = manager_of(attention(), max_sequences=2)
    first = manager.create_sequence("a", (1,))
    manager.create_sequence("b")
    for reserve in ((1,), None):
        with pytest.raises(CapacityError, match="2 sequences are open, max_sequences is 2") as caught:
            manager.create_sequence("c", reserve)
        assert not caught.value.permanent
    assert not manager.can_admit((1,)).admitted
    first.close()
    manager.create_sequence("c", (1,))


@pytest.mark.parametrize("reserve", [(), (1, 1), (-1,)])
def test_reservation_of_another_length_is_refused(reserve: tuple[int, ...]) -> None:
    manager = manager_of(attention(), slots=8)
    with pytest.raises(ConfigError, match=r"one per pool group|slots is -1"):
        manager.create_sequence("a", reserve)
    assert not manager.sequences


@given(
    kinds=st.lists(
        st.one_of(
            st.builds(attention, st.one_of(st.none(), st.integers(1, 12)), head_dim=st.sampled_from([4, 8])),
            st.just(recurrent(2, 3)),
        ),
        min_size=1,
        max_size=3,
    ),
    requests=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 6)), min_size=1, max_size=6),
    more=st.integers(0, 12),
    order=st.randoms(use_true_random=False),
)
def test_sequence_that_stays_within_its_reservation_never_lacks_a_page(
    kinds: list, requests: list[tuple[int, int]], more: int, order: Any
) -> None:
    """Also when prompts share pages, partly filled blocks and states: copies find room, or are not needed."""
    layout = build_layout(model(*kinds), tokens_per_block=4)
    manager = KVCacheManager(layout, [floor + more for floor in slot_floors(layout)])
    running = []
    for prompt, new in requests:
        peak = peak_slots(layout, prefill_steps(prompt, prompt) + decode_steps(prompt, new + 1))
        tokens = [1] * (prompt + new)
        if not manager.can_admit(peak).admitted:
            continue
        sequence = manager.create_sequence("s", peak, token_ids=tokens[: order.randint(0, 1) * (prompt - 1)])
        running.append((sequence, tokens, prompt))
    while running:
        sequence, tokens, prompt = running[order.randrange(len(running))]
        if sequence.row < 0:
            sequence.resume()
        elif sequence.committed == len(tokens):
            sequence.close()
            running = [entry for entry in running if entry[0] is not sequence]
        else:
            end = max(prompt, sequence.committed + 1)
            sequence.resize(capacity=end)
            sequence.commit(tokens[sequence.committed : end])
        manager.check_integrity()


def test_stall_is_told_once_nothing_has_moved_for_long_enough() -> None:
    watch = StallWatch(10.0)
    assert watch.stalled_seconds(0.0, (1, 1), waiting=True) is None
    assert watch.stalled_seconds(9.9, (1, 1), waiting=True) is None
    assert watch.stalled_seconds(10.0, (1, 1), waiting=True) == 10.0
    assert watch.stalled_seconds(25.0, (1, 1), waiting=True) == 25.0


@pytest.mark.parametrize("marks, waiting", [((1, 2), True), ((1, 1), False)])
def test_stall_ends_when_something_moves_or_nobody_waits(marks: tuple[int, int], waiting: bool) -> None:
    watch = StallWatch(10.0)
    watch.stalled_seconds(0.0, (1, 1), waiting=True)
    assert watch.stalled_seconds(20.0, marks, waiting=waiting) is None
    assert watch.stalled_seconds(29.0, marks, waiting=True) is None
    assert watch.stalled_seconds(40.0, marks, waiting=True) is not None


def test_books_of_capacities_need_no_memory() -> None:
    layout = build_layout(model(attention(heads=64, head_dim=128)), tokens_per_block=64)
    manager = KVCacheManager(layout, [1 << 20], "meta")
    sequence = manager.create_sequence("s", (1 << 20,))
    sequence.resume()
    sequence.resize(capacity=64 << 20)
    assert free(manager) == [0]
    assert np.array_equal(sequence.slots(layout.life_cycles[0].id), np.arange(1 << 20))


def test_sequence_without_a_reservation_takes_nothing_that_is_promised() -> None:
    manager = manager_of(attention(), slots=8)
    promised, other = manager.create_sequence("promised", (6,)), manager.create_sequence("other")
    promised.resume()
    other.resume()
    other.resize(capacity=8)
    with pytest.raises(CapacityError, match=r"needs \[1\] .* no reservation; \[0\] are not promised") as caught:
        other.resize(capacity=9)
    assert (caught.value.requested, caught.value.available, other.capacity) == ((1,), (0,), 8)
    promised.resize(capacity=24)
    manager.check_integrity()


def test_sequence_without_a_reservation_reuses_no_page_that_is_promised() -> None:
    manager = manager_of(attention(), slots=8)
    first = manager.create_sequence("first")
    first.resume()
    first.resize(capacity=16)
    first.commit(range(16))
    first.close()
    promised = manager.create_sequence("promised", (6,))
    other = manager.create_sequence("other", token_ids=range(16))
    assert other.reused_tokens == 0
    promised.resume()
    promised.resize(capacity=24)
    promised.close()
    other.close()
    manager.check_integrity()


def test_sequence_without_a_reservation_that_needs_nothing_of_a_full_group_goes_on() -> None:
    """Pages that are promised and read count twice: what is left of their group is below 0."""
    manager = manager_of(attention(), attention(4, heads=4), slots=12)
    promised = manager.create_sequence("promised", (0, 11))
    promised.resume()
    other = manager.create_sequence("other")
    other.resume()
    other.resize(capacity=4, history=4)
    hold = manager.hold(other.pages(4), Access.READ)
    assert manager.unpromised()[1] < 0
    other.resize(capacity=8, history=8)
    manager.release(hold)
    manager.check_integrity()
