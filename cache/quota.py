"""Bytes to slots: how a memory budget is divided over pool groups, in whole grains.

A grain is the smallest unit in which memory can be taken for a pool. A group is given here as the slot sizes of its
pools, in bytes: they are allocated in lock step, so n slots take ceil(n * size / grain) grains in each of its pools.
"""

import math
from collections.abc import Iterable, Sequence

from kvferry.cache.errors import ConfigError
from kvferry.cache.lifecycle import ceil_div

PoolBytes = Sequence[int]
"""Bytes of one slot in each pool of a group. Shapes: [num_pools]."""

_MIB, _GIB = 1 << 20, 1 << 30


def device_grain_bytes(quota_bytes: int) -> int:
    """The grain of GPU pools: 2 MiB for quotas below 2 GiB, doubling with the quota up to 32 MiB from 16 GiB."""
    return 2 * _MIB << min(4, max(0, (quota_bytes // _GIB).bit_length() - 1))


def grains(num_slots: int, pool_bytes: PoolBytes, grain_bytes: int) -> int:
    """Grains that `num_slots` slots of a group take."""
    return sum(ceil_div(num_slots * size, grain_bytes) for size in pool_bytes)


def slots_in(num_grains: int, pool_bytes: PoolBytes, grain_bytes: int) -> int:
    """The most slots of a group that fit into `num_grains` grains."""
    low, high = 0, num_grains * grain_bytes // sum(pool_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if grains(middle, pool_bytes, grain_bytes) <= num_grains:
            low = middle
        else:
            high = middle - 1
    return low


def divide(
    groups: Sequence[PoolBytes],
    quota_bytes: int,
    weights: Sequence[float],
    floors: Sequence[int],
    *,
    grain_bytes: int = 4096,
    raise_quota_to_floor: bool = False,
) -> tuple[int, ...]:
    """Slots per pool group that a byte budget pays for.

    Args:
        quota_bytes: rounded up to whole grains, so that the pools hold at least what was asked for.
        weights: how the bytes are shared, one per group; only their ratios matter.
        floors: slots that every group gets at least, 1 or more; they win over the weights.
        raise_quota_to_floor: take what the floors need when the quota is less.

    Raises:
        ConfigError: weights or floors do not fit the groups, or the quota is below the floors.

    Source: pools specification 3.2.
    """
    _check(groups, weights, floors)
    floor_grains = _each_grains(floors, groups, grain_bytes)
    budget = ceil_div(quota_bytes, grain_bytes)
    if budget < sum(floor_grains) and not raise_quota_to_floor:
        raise ConfigError(
            f"pool quota is {quota_bytes} bytes, but the pools need at least {list(floors)} slots of "
            f"{[sum(sizes) for sizes in groups]} bytes, {sum(floor_grains) * grain_bytes} bytes: raise the quota to at "
            "least that"
        )
    shared = _share(max(budget, sum(floor_grains)), groups, weights, floors, grain_bytes)
    return tuple(_filled_up(count, sizes, grain_bytes) for count, sizes in zip(shared, groups, strict=True))


def check_weights(name: str, values: Sequence[float], count: int, per: str) -> None:
    """Raise ConfigError unless `values` are `count` positive, finite numbers."""
    if len(values) != count or not all(math.isfinite(value) and value > 0 for value in values):
        raise ConfigError(f"{name} {list(values)}: need {count} positive numbers, one per {per}")


def check_shares(name: str, values: Sequence[float], count: int, per: str) -> None:
    """As `check_weights`, and the sum must be 1 up to the rounding of floats."""
    check_weights(name, values, count, per)
    if count and not math.isclose(math.fsum(values), 1.0, abs_tol=1e-6):
        raise ConfigError(f"{name} {list(values)} sum to {math.fsum(values)}: they must sum to 1.0")


def _check(groups: Sequence[PoolBytes], weights: Sequence[float], floors: Sequence[int]) -> None:
    check_weights("pool weights", weights, len(groups), "pool group")
    if len(floors) != len(groups) or min(floors) < 1:
        raise ConfigError(f"slot floors {list(floors)}: need {len(groups)} numbers of 1 or more, one per pool group")


def _each_grains(counts: Iterable[int], groups: Sequence[PoolBytes], grain_bytes: int) -> list[int]:
    return [grains(count, sizes, grain_bytes) for count, sizes in zip(counts, groups, strict=True)]


def _share(
    budget: int, groups: Sequence[PoolBytes], weights: Sequence[float], floors: Sequence[int], grain_bytes: int
) -> list[int]:
    """Slots by weight. Groups that would not rise above their floor are pinned there and the others share anew.

    It ends: a round without a pin is the last. It never runs dry: the budget covers all floors, and a pin takes no
    more than its own.
    """
    slots = list(floors)
    free = list(range(len(groups)))
    while free:
        pinned = [index for index in range(len(groups)) if index not in free]
        left = budget - sum(grains(floors[index], groups[index], grain_bytes) for index in pinned)
        for index, count in _proportional(left, free, groups, weights, grain_bytes):
            slots[index] = max(count, floors[index])
        above = [index for index in free if slots[index] > floors[index]]
        if above == free:
            break
        free = above
    return slots


def _proportional(
    left: int, members: Sequence[int], groups: Sequence[PoolBytes], weights: Sequence[float], grain_bytes: int
) -> Iterable[tuple[int, int]]:
    """Share grains by weight, smallest weight first; what a group cannot use stays for those after it."""
    weight_left = math.fsum(weights[index] for index in members)
    for rank, index in enumerate(sorted(members, key=lambda member: weights[member]), start=1):
        share = left if rank == len(members) else min(left, round(left * weights[index] / weight_left))
        count = slots_in(share, groups[index], grain_bytes)
        left -= grains(count, groups[index], grain_bytes)
        weight_left -= weights[index]
        yield index, count


def _filled_up(num_slots: int, pool_bytes: PoolBytes, grain_bytes: int) -> int:
    """The most slots that cost no more grains than `num_slots` do."""
    return slots_in(grains(num_slots, pool_bytes, grain_bytes), pool_bytes, grain_bytes)
