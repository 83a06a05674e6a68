import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.errors import ConfigError
from kvferry.cache.quota import device_grain_bytes, divide, grains, slots_in

MIB, GIB = 1 << 20, 1 << 30
THREE_GROUPS = [[16_252_928, 4_063_232], [491_520, 126_720, 15_872], [31_457_280, 7_864_320]]

pools = st.lists(st.integers(1, 5000), min_size=1, max_size=4)
group_lists = st.lists(pools, min_size=1, max_size=4)


@pytest.mark.parametrize(
    "quota_gib, grain_mib",
    [(0, 2), (1, 2), (1.99, 2), (2, 4), (3.99, 4), (4, 8), (8, 16), (15.9, 16), (16, 32), (80, 32)],
)
def test_device_grain_doubles_with_the_quota(quota_gib: float, grain_mib: int) -> None:
    assert device_grain_bytes(int(quota_gib * GIB)) == grain_mib * MIB


@given(pools, st.integers(1, 4096), st.integers(0, 500))
def test_slots_in_is_the_largest_count_that_fits(sizes: list[int], grain: int, budget: int) -> None:
    count = slots_in(budget, sizes, grain)
    assert grains(count, sizes, grain) <= budget < grains(count + 1, sizes, grain)


def test_grains_every_pool_is_rounded_up_by_itself() -> None:
    assert grains(3, [100, 10], 64) == math.ceil(300 / 64) + math.ceil(30 / 64)


def test_slots_in_less_than_one_grain_per_pool_is_nothing() -> None:
    assert slots_in(2, [1, 1, 1], 4096) == 0


def test_vector_5_4_rounding_two_slots_of_almost_one_grain_give_2_and_3() -> None:
    """Five grains shared equally: half of five rounds to the even two, which is group 0's floor anyway."""
    grain = 2 * MIB
    assert divide([[grain - 1], [grain]], 5 * grain, [0.5, 0.5], [2, 2], grain_bytes=grain) == (2, 3)


def test_vector_5_4_three_groups_at_exactly_the_floor_keep_their_floors() -> None:
    grain, floors = 16 * MIB, [157, 3907, 157]
    needed = sum(grains(n, sizes, grain) for n, sizes in zip(floors, THREE_GROUPS, strict=True))
    assert needed == 710
    slots = divide(THREE_GROUPS, needed * grain, [0.2, 0.5, 0.3], floors, grain_bytes=grain)
    # Group 1 gets 18 slots beyond its floor: they fit into the grains it has paid for.
    assert slots == (157, 3925, 157)


def test_vector_5_4_three_groups_one_grain_less_is_refused_or_raised() -> None:
    grain, floors, quota = 16 * MIB, [157, 3907, 157], 709 * 16 * MIB
    with pytest.raises(ConfigError) as refused:
        divide(THREE_GROUPS, quota, [0.2, 0.5, 0.3], floors, grain_bytes=grain)
    for number in (str(quota), "[157, 3907, 157]", "[20316160, 634112, 39321600]", str(710 * grain)):
        assert number in str(refused.value)
    raised = divide(THREE_GROUPS, quota, [0.2, 0.5, 0.3], floors, grain_bytes=grain, raise_quota_to_floor=True)
    assert raised == (157, 3925, 157)


def test_divide_quota_is_rounded_up_to_whole_grains() -> None:
    """A quota of 1,230 slots for the resume gate is no multiple of the grain, and all of them must be there."""
    assert divide([[2048]], 1230 * 2048, [1.0], [1], grain_bytes=2 * MIB) == (2048,)


def test_divide_without_quota_at_all_is_refused_or_raised_to_the_floors() -> None:
    with pytest.raises(ConfigError, match="raise the quota"):
        divide([[64], [32]], 0, [1.0, 1.0], [2, 3], grain_bytes=64)
    assert divide([[64], [32]], 0, [1.0, 1.0], [2, 3], grain_bytes=64, raise_quota_to_floor=True) == (2, 4)


def test_divide_pinned_group_leaves_the_rest_to_the_others_by_weight() -> None:
    # Group 0 needs 50 of 100 grains whatever its weight; 1 and 2 share the other 50 as 1 to 4.
    assert divide([[1], [1], [1]], 100, [1.0, 1.0, 4.0], [50, 1, 1], grain_bytes=1) == (50, 10, 40)


def test_divide_equal_groups_share_equally_in_the_order_given() -> None:
    assert divide([[1], [1], [1]], 10, [1.0, 1.0, 1.0], [1, 1, 1], grain_bytes=1) == (3, 4, 3)


@given(group_lists, st.integers(0, 1 << 20), st.integers(1, 4096), st.data())
def test_divide_keeps_floors_within_the_rounded_quota(
    groups: list[list[int]], quota: int, grain: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.001, 1000), min_size=len(groups), max_size=len(groups)))
    floors = data.draw(st.lists(st.integers(1, 20), min_size=len(groups), max_size=len(groups)))
    needed = sum(grains(n, sizes, grain) for n, sizes in zip(floors, groups, strict=True))
    budget = max(needed, math.ceil(Fraction(quota, grain)))
    slots = divide(groups, quota, weights, floors, grain_bytes=grain, raise_quota_to_floor=True)
    spent = [grains(n, sizes, grain) for n, sizes in zip(slots, groups, strict=True)]
    assert all(n >= floor for n, floor in zip(slots, floors, strict=True))
    assert sum(spent) <= budget
    # No group could have one slot more for what it has paid.
    assert all(grains(n + 1, sizes, grain) > paid for n, sizes, paid in zip(slots, groups, spent, strict=True))


@given(pools, st.integers(1, 4096), st.integers(1, 1 << 22))
def test_divide_single_group_uses_the_whole_budget(sizes: list[int], grain: int, quota: int) -> None:
    slots = divide([sizes], quota, [1.0], [1], grain_bytes=grain, raise_quota_to_floor=True)
    budget = max(math.ceil(Fraction(quota, grain)), grains(1, sizes, grain))
    assert slots == (slots_in(budget, sizes, grain),)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, 1.0, 1.0], [1.0, math.nan], [1.0, math.inf]])
def test_divide_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="need 2 positive numbers"):
        divide([[8], [8]], 1 << 20, weights, [1, 1])


@pytest.mark.parametrize("floors", [[1], [1, 0], [1, -3], [1, 1, 1]])
def test_divide_bad_floors_are_refused(floors: list[int]) -> None:
    with pytest.raises(ConfigError, match="slot floors"):
        divide([[8], [8]], 1 << 20, [1.0, 1.0], floors)
