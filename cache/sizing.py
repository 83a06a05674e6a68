"""How many slots a workload needs and how many a budget gives. The only place where either is computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import CacheLayout
from kvferry.cache.lifecycle import LifeCycle, ceil_div

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """The cursors of one request over its life.

    Shapes: history and capacity are [num_steps], in tokens; capacity >= history.
    """

    history: Counts
    capacity: Counts

    def __add__(self, other: "Steps") -> "Steps":
        return Steps(np.concatenate([self.history, other.history]), np.concatenate([self.capacity, other.capacity]))


def prefill_steps(prompt_tokens: int, chunk_tokens: int) -> Steps:
    """Computing a prompt chunk by chunk, then holding it with the whole prompt as history."""
    starts = np.arange(0, prompt_tokens, chunk_tokens, dtype=np.int64)
    ends = np.minimum(starts + chunk_tokens, prompt_tokens)
    return Steps(np.append(starts, prompt_tokens), np.append(ends, prompt_tokens))


def decode_steps(prompt_tokens: int, max_new_tokens: int) -> Steps:
    """Receiving a prompt as history, then generating.

    The first new token comes from prefill, so position prompt_tokens + i holds new token i and the last new token is
    never stored.
    """
    history = np.arange(prompt_tokens, prompt_tokens + max(1, max_new_tokens - 1), dtype=np.int64)
    stored = history + (1 if max_new_tokens > 1 else 0)
    return Steps(np.append(prompt_tokens, history), np.append(prompt_tokens, stored))


def live_blocks(life_cycle: LifeCycle, steps: Steps, tokens_per_block: int) -> Counts:
    """Pages of one life cycle at every step. Shapes: [num_steps]."""
    blocks = -(-steps.capacity // tokens_per_block)
    if life_cycle.window is None:
        return blocks
    first = np.minimum(-(-steps.history // tokens_per_block), life_cycle.sink_blocks)
    last = np.maximum(first, (steps.history + 1 - life_cycle.window) // tokens_per_block)
    stale: Counts = np.minimum(last, blocks) - np.minimum(first, blocks)
    return blocks - stale


def peak_slots(layout: CacheLayout, steps: Steps) -> tuple[int, ...]:
    """The most slots a request holds at once, per pool group: exact, not a bound."""
    peaks = []
    for group in layout.pool_groups:
        members = [layout.life_cycles[index].life_cycle for index in group.life_cycles]
        total = sum(live_blocks(member, steps, layout.tokens_per_block) for member in members)
        peaks.append(int(np.max(total)))
    return tuple(peaks)


def slot_floors(layout: CacheLayout) -> tuple[int, ...]:
    """Fewest slots per pool group with which one sequence can move at all.

    A windowed life cycle needs its window and the block it straddles; full attention at least as many blocks as the
    largest window of the model. Source: pools specification 3.5.
    """
    windowed = [member.life_cycle.max_live_blocks(1, layout.tokens_per_block) for member in layout.life_cycles]
    widest = max((floor for floor in windowed if floor is not None), default=1)
    return tuple(sum(windowed[index] or widest for index in group.life_cycles) for group in layout.pool_groups)


def divide_quota(
    layout: CacheLayout, quota_bytes: int, weights: Sequence[float], *, grain_bytes: int = 4096
) -> tuple[int, ...]:
    """Slots per pool group that a byte budget pays for.

    Args:
        quota_bytes: rounded down to whole grains.
        weights: positive, one per pool group: how the bytes are shared. `slot_floors` win over them.
        grain_bytes: smallest unit in which memory can be taken for a pool.

    Raises:
        ConfigError: the weights do not fit the layout, or the budget is below the floors (with the numbers).

    Source: pools specification 3.2.
    """
    sizes = [group.slot_bytes for group in layout.pool_groups]
    if len(weights) != len(sizes) or any(weight <= 0 for weight in weights):
        raise ConfigError(f"pool weights {list(weights)}: need {len(sizes)} positive numbers, one per pool group")
    floors = slot_floors(layout)
    floor_grains = [ceil_div(n * size, grain_bytes) for n, size in zip(floors, sizes, strict=True)]
    budget = quota_bytes // grain_bytes
    if budget < sum(floor_grains):
        raise ConfigError(
            f"pool quota is {quota_bytes} bytes, but one sequence needs {list(floors)} slots of {sizes} bytes, "
            f"{sum(floor_grains) * grain_bytes} bytes: raise the quota to at least that"
        )
    grains = _share_grains(budget, weights, floor_grains, sizes, grain_bytes)
    return tuple(grain * grain_bytes // size for grain, size in zip(grains, sizes, strict=True))


def _share_grains(
    budget: int, weights: Sequence[float], floors: Sequence[int], sizes: Sequence[int], grain_bytes: int
) -> list[int]:
    """Split whole grains by weight; groups that fall below their floor are pinned there and the rest shares anew."""
    pinned: dict[int, int] = {}
    while True:
        free = [index for index in range(len(weights)) if index not in pinned]
        shares = _proportional(budget - sum(pinned.values()), {index: weights[index] for index in free})
        below = {index: floors[index] for index in free if shares[index] < floors[index]}
        if not below:
            break
        pinned.update(below)
    grains = {**pinned, **shares}
    return [grains[index] for index in range(len(weights))]


def _proportional(budget: int, weights: dict[int, float]) -> dict[int, int]:
    """Whole shares that sum to the budget, smallest weight first so that rounding favours nobody."""
    shares: dict[int, int] = {}
    left, weight_left = budget, sum(weights.values())
    for index, weight in sorted(weights.items(), key=lambda item: item[1]):
        shares[index] = round(left * weight / weight_left) if weight_left > weight else left
        left -= shares[index]
        weight_left -= weight
    return shares


def step_weights(layout: CacheLayout, steps: Steps) -> tuple[float, ...]:
    """Weights for `divide_quota` in which every pool group fills up after the same number of such requests."""
    peaks = peak_slots(layout, steps)
    return tuple(float(max(1, n) * group.slot_bytes) for n, group in zip(peaks, layout.pool_groups, strict=True))
