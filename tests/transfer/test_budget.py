"""How many bytes and requests of one direction may be under way."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import LocalProtocolError
from kvferry.transfer.budget import STALE_SECONDS, TransferBudget

NOW = 1000.0


def budget_with(
    active: Sequence[int] = (), max_bytes: int = 4, max_requests: int = 0, stale_seconds: float | None = STALE_SECONDS
) -> TransferBudget:
    """A budget whose active transfers entered at NOW."""
    budget = TransferBudget(max_bytes, max_requests, stale_seconds)
    for index, num_bytes in enumerate(active):
        budget.enter(index, num_bytes, NOW)
    return budget


@pytest.mark.parametrize(
    "active, line, admitted",
    [
        ([], [2, 2, 1], 2),
        ([], [5], 1),
        ([], [5, 1], 1),
        ([], [1, 5, 1], 1),
        ([3], [2], 0),
        ([3], [2, 1], 0),
        ([3], [1, 1], 1),
        ([5], [0], 0),
        ([4], [0, 0], 2),
        ([], [], 0),
    ],
)
def test_line_of_requests_enters_up_to_the_first_that_does_not_fit(
    active: list[int], line: list[int], admitted: int
) -> None:
    assert budget_with(active).num_admissible(line, NOW) == admitted


@pytest.mark.parametrize("waited, admitted", [(0.0, 0), (30.0, 0), (31.0, 1)])
def test_stale_transfer_counts_no_more(waited: float, admitted: int) -> None:
    budget = budget_with([3])
    assert budget.num_admissible([2], NOW + waited) == admitted
    assert len(budget) == 1


def test_without_a_stale_limit_a_transfer_counts_until_it_leaves() -> None:
    budget = budget_with([3], stale_seconds=None)
    assert budget.num_admissible([2], NOW + 1e9) == 0
    budget.leave(0)
    assert budget.num_admissible([2], NOW + 1e9) == 1


def test_budget_of_zero_is_no_limit() -> None:
    assert budget_with([1 << 40], max_bytes=0).num_admissible([1 << 50] * 100, NOW) == 100


@pytest.mark.parametrize("active, admitted", [([], 2), ([1], 1), ([1, 1], 0)])
def test_no_more_requests_than_the_limit_are_active(active: list[int], admitted: int) -> None:
    assert budget_with(active, max_bytes=0, max_requests=2).num_admissible([1, 1, 1], NOW) == admitted


def test_line_is_not_read_beyond_the_first_that_does_not_fit() -> None:
    line = iter([2, 3, 1])
    assert budget_with().num_admissible(line, NOW) == 1
    assert list(line) == [1]


def test_transfer_enters_once_and_leaves_any_number_of_times() -> None:
    budget = budget_with([1])
    assert 0 in budget
    with pytest.raises(LocalProtocolError, match="entered the budget already"):
        budget.enter(0, 1, NOW)
    budget.leave(0)
    budget.leave(0)
    assert 0 not in budget
    assert len(budget) == 0


Steps = st.lists(st.one_of(st.integers(0, 12), st.just("leave"), st.just("wait")), max_size=40)


@given(st.integers(1, 8), st.integers(0, 4), Steps)
def test_budget_is_kept_in_order_whatever_comes_and_goes(
    max_bytes: int, max_requests: int, steps: list[int | str]
) -> None:
    """Never more than the budget among those that count, unless one alone is larger; the order of arrival is kept."""
    budget, now = TransferBudget(max_bytes, max_requests), NOW
    line: list[tuple[int, int]] = []
    active: dict[int, tuple[int, float]] = {}
    admitted: list[int] = []
    for number, step in enumerate(steps):
        if step == "leave" and active:
            budget.leave(next(iter(active)))
            del active[next(iter(active))]
        elif step == "wait":
            now += STALE_SECONDS * 0.6
        elif isinstance(step, int):
            line.append((number, step))
        count = budget.num_admissible((num_bytes for _, num_bytes in line), now)
        for key, num_bytes in line[:count]:
            budget.enter(key, num_bytes, now)
            active[key] = num_bytes, now
            admitted.append(key)
        del line[:count]
        counted = [num_bytes for num_bytes, since in active.values() if now - since <= STALE_SECONDS]
        if count:
            assert sum(counted) <= max_bytes or len(counted) == 1
            assert not max_requests or len(counted) <= max_requests
        assert counted or not line, "somebody waits although nothing is active"
        assert len(budget) == len(active)
    assert admitted == sorted(admitted)
