"""How many slots sequences hold, and how many a budget gives. The only place where either is computed.

`quota` divides bytes over raw slot sizes, `workload` says what a described load needs; here both meet a layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import CacheLayout, LifeCycleLayout
from kvferry.cache.lifecycle import Counts, LifeCycle, ceil_div
from kvferry.cache.quota import check_shares, divide


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
    return life_cycle.live_counts(steps.history, steps.capacity, tokens_per_block)


def scratch_counts(
    life_cycle: LifeCycle, steps: Steps, tokens_per_block: int, max_rewind_tokens: int = 0, *, from_block: int = 0
) -> Counts:
    """Blocks at or after `from_block` that need no page of their own: the lengths of `LifeCycle.scratch_range`.

    Shapes: [num_steps].
    """
    if life_cycle.window is None:
        return np.zeros_like(steps.history)
    settled = np.maximum(0, steps.capacity - max_rewind_tokens)
    start, end = life_cycle.stale_bounds(settled, tokens_per_block)
    start = np.maximum(np.maximum(start, from_block), -(-steps.history // tokens_per_block))
    return np.maximum(0, np.minimum(end, -(-steps.capacity // tokens_per_block)) - start)


def scratch_slots(member: LifeCycleLayout, num_blocks: Counts) -> Counts:
    """Slots that hold this many scratch blocks: one layer runs at a time, so a block takes one sub-page of a slot."""
    slots: Counts = -(-num_blocks // member.sub_pages)
    return slots


def per_group(layout: CacheLayout, counts: Sequence[Counts]) -> list[Counts]:
    """Sum what is counted per life cycle over the life cycles of each pool group. Shapes: all alike."""
    return [np.sum([counts[index] for index in group.life_cycles], axis=0) for group in layout.pool_groups]


def peak_slots(layout: CacheLayout, steps: Steps, *, max_rewind_tokens: int | None = None) -> tuple[int, ...]:
    """The most slots a request holds at once, per pool group: exact, not a bound.

    Args:
        max_rewind_tokens: prompts are computed with scratch pages, and this many tokens may still be rewound; None:
            without scratch pages.
    """
    needs = [_step_slots(member, steps, layout.tokens_per_block, max_rewind_tokens) for member in layout.life_cycles]
    return tuple(int(np.max(total)) for total in per_group(layout, needs))


def _step_slots(member: LifeCycleLayout, steps: Steps, tokens_per_block: int, max_rewind_tokens: int | None) -> Counts:
    live = live_blocks(member.life_cycle, steps, tokens_per_block)
    if max_rewind_tokens is None:
        return live
    scratch = scratch_counts(member.life_cycle, steps, tokens_per_block, max_rewind_tokens)
    return live - scratch + scratch_slots(member, scratch)


def slot_floors(layout: CacheLayout) -> tuple[int, ...]:
    """Fewest slots per pool group with which one sequence can move at all.

    A windowed life cycle needs its window and the block it straddles; full attention at least as many blocks as the
    largest window of the model; a recurrent one its state. Source: pools specification 3.5.
    """
    bounds = [member.life_cycle.max_live_blocks(1, layout.tokens_per_block) for member in layout.life_cycles]
    widest = max((bound for bound in bounds if bound is not None), default=1)
    return tuple(sum(bounds[index] or widest for index in group.life_cycles) for group in layout.pool_groups)


def divide_quota(
    layout: CacheLayout,
    quota_bytes: int,
    weights: Sequence[float],
    *,
    floors: Sequence[int] | None = None,
    grain_bytes: int = 4096,
    raise_quota_to_floor: bool = False,
) -> tuple[int, ...]:
    """Slots per pool group that a byte budget pays for. See `quota.divide`.

    Args:
        weights: positive, one per pool group: how the bytes are shared.
        floors: slots that every group gets at least; `slot_floors` when None.

    Raises:
        ConfigError: the weights do not fit the layout, or the budget is below the floors (with the numbers).
    """
    return divide(
        [group.pool_bytes for group in layout.pool_groups],
        quota_bytes,
        weights,
        slot_floors(layout) if floors is None else floors,
        grain_bytes=grain_bytes,
        raise_quota_to_floor=raise_quota_to_floor,
    )


def step_weights(layout: CacheLayout, steps: Steps) -> tuple[float, ...]:
    """Weights for `divide_quota` in which every pool group fills up after the same number of such requests."""
    peaks = peak_slots(layout, steps)
    return tuple(float(max(1, n) * group.slot_bytes) for n, group in zip(peaks, layout.pool_groups, strict=True))


def static_slots(
    layout: CacheLayout, quota_bytes: int, shares: Sequence[float] | None = None, *, num_states: int | None = None
) -> tuple[int, ...]:
    """Slots per pool group when every pool gets a fixed share of the bytes, as V1 pools do.

    Args:
        layout: of `build_static_layout`; any other works as well.
        shares: one per pool group that shares, positive, summing to 1; equal shares when None.
        num_states: slots of the pool of recurrent states, taken before the others share the rest. When None that pool
            is one of those that share.

    Raises:
        ConfigError: the shares do not fit, or some pool gets less than its `slot_floors` (with the numbers).

    Source: pools specification 2.
    """
    sharing, fixed_bytes = _sharing_groups(layout, num_states)
    if shares is None:
        shares = [1 / len(sharing) for _ in sharing]
    check_shares("pool shares", shares, len(sharing), "pool that shares the quota")
    slots = [num_states or 0] * len(layout.pool_groups)
    for index, share in zip(sharing, shares, strict=True):
        part = max(0, quota_bytes - fixed_bytes) * (share / math.fsum(shares))
        slots[index] = int(part) // layout.pool_groups[index].slot_bytes
    _check_static_floors(layout, quota_bytes, fixed_bytes, slots)
    return tuple(slots)


def _sharing_groups(layout: CacheLayout, num_states: int | None) -> tuple[list[int], int]:
    """Pool groups that share the quota, and the bytes that are taken before."""
    everyone = list(range(len(layout.pool_groups)))
    recurrent = layout.recurrent
    if num_states is None:
        return everyone, 0
    if num_states < 1:
        raise ConfigError(f"num_states is {num_states}: one sequence needs at least one state")
    if recurrent is None:
        raise ConfigError(f"num_states is {num_states}, but {layout.model} has no recurrent layers: leave it out")
    group = layout.pool_groups[recurrent.pool_group]
    if len(group.life_cycles) > 1:
        raise ConfigError(
            f"num_states is {num_states}, but the states of {layout.model} share their pool: leave it out"
        )
    return [index for index in everyone if index != group.id], num_states * group.slot_bytes


def _check_static_floors(layout: CacheLayout, quota_bytes: int, fixed_bytes: int, slots: Sequence[int]) -> None:
    floors = slot_floors(layout)
    if fixed_bytes <= quota_bytes and all(n >= floor for n, floor in zip(slots, floors, strict=True)):
        return
    sizes = [group.slot_bytes for group in layout.pool_groups]
    states = f", {fixed_bytes} bytes of it for recurrent states" if fixed_bytes else ""
    raise ConfigError(
        f"pool quota is {quota_bytes} bytes{states}: it gives {list(slots)} slots of {sizes} bytes, but one sequence "
        f"needs {list(floors)}: raise the quota, or give the short pools a larger share"
    )


def clamp_max_seq_len(
    layout: CacheLayout, num_slots: Sequence[int], batch: int, upper: int, *, headroom: int = 1
) -> int:
    """Tokens that one sequence may store while `batch` - 1 others keep one block each, at most `upper`.

    Windows are charged with the block they straddle, so the sequence can grow to this length at any alignment.

    Args:
        headroom: most tokens by which capacity runs ahead of history.

    Returns: whole blocks, or `upper` when that is less; 0 when not even one block is left.

    Source: pools specification 3.10, with the bound of 3.7 in place of one alignment.
    """
    others = _sequence_slots(layout, 1, headroom)
    left = [slots - (batch - 1) * need for slots, need in zip(num_slots, others, strict=True)]
    low, high = 0, ceil_div(max(0, upper), layout.tokens_per_block)
    while low < high:
        middle = (low + high + 1) // 2
        need = _sequence_slots(layout, middle, headroom)
        if all(slots <= room for slots, room in zip(need, left, strict=True)):
            low = middle
        else:
            high = middle - 1
    return min(low * layout.tokens_per_block, max(0, upper))


def _sequence_slots(layout: CacheLayout, num_blocks: int, headroom: int) -> list[int]:
    """The most slots per pool group that a sequence needs while it grows to `num_blocks` blocks."""
    bounds = [member.life_cycle.max_live_blocks(headroom, layout.tokens_per_block) for member in layout.life_cycles]
    needs = [num_blocks if bound is None else min(num_blocks, bound) for bound in bounds]
    return [sum(needs[index] for index in group.life_cycles) for group in layout.pool_groups]
