"""What a pool is sized for: described batches, the slots they need, and the weights and floors that follow."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import CacheLayout, LifeCycleLayout
from kvferry.cache.lifecycle import Counts, LifeCycle
from kvferry.cache.quota import check_shares, grains
from kvferry.cache.sizing import Steps, divide_quota, per_group, scratch_counts, scratch_slots, slot_floors


class StepRequest(NamedTuple):
    """One request in a step: tokens it can store after the step, and those that need no query in it."""

    capacity: int
    history: int


@dataclass(frozen=True)
class Batch:
    """Requests that hold their pages at the same time.

    Attributes:
        shared_tokens: leading tokens that all requests have in common; their whole blocks are stored once.

    Raises:
        ConfigError: a history is negative or above its capacity, or shared_tokens is negative.
    """

    requests: tuple[StepRequest, ...]
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        for capacity, history in self.requests:
            if not 0 <= history <= capacity:
                raise ConfigError(
                    f"batch has history {history} with capacity {capacity}: need 0 <= history <= capacity"
                )
        if self.shared_tokens < 0:
            raise ConfigError(f"batch shares {self.shared_tokens} tokens: it cannot be negative")

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]], shared_tokens: int = 0) -> "Batch":
        """A batch of (capacity, history) pairs."""
        return cls(tuple(StepRequest(capacity, history) for capacity, history in requests), shared_tokens)

    @property
    def steps(self) -> Steps:
        """The cursors as arrays. Shapes: [num_requests]."""
        pairs = np.array(self.requests, np.int64).reshape(-1, 2)
        return Steps(history=pairs[:, 1], capacity=pairs[:, 0])


FALLBACK_BATCH = Batch.of([(2049, 2048)])
"""One request that decodes at 2,048 tokens: what is assumed when nothing is known. Source: pools specification 3.3."""


@dataclass(frozen=True)
class Workload:
    """What is known about the load that pools are sized for. What is None or empty is not known.

    The weights of the pool groups come from the first of these that is given: `ratio`, `typical`, `constraints`, the
    fallback batch. The floors come from every batch that has to fit, whatever decides the weights, and win over them.

    Attributes:
        ratio: share of the bytes per life cycle, positive, summing to 1.
        typical: the batch to fill the pools with.
        constraints: batches that must fit.
        prefill_tokens: the longest chunk of a prompt computed at once; such a chunk must fit. It does not decide the
            weights: a prompt holds every block of all life cycles, which would starve full attention in decode.
        max_util_for_resume: utilisation of a pool group above which no sequence is resumed, in (0, 1].
        max_rewind_tokens: prompts are computed with scratch pages and this many tokens may be rewound; None: without.
    """

    ratio: tuple[float, ...] | None = None
    typical: Batch | None = None
    constraints: tuple[Batch, ...] = ()
    prefill_tokens: int | None = None
    max_util_for_resume: float = 1.0
    max_rewind_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.max_util_for_resume <= 1:
            raise ConfigError(f"max_util_for_resume is {self.max_util_for_resume}: need a number in (0, 1]")

    @property
    def must_fit(self) -> tuple[Batch, ...]:
        """Every batch that the pools have to hold: the constraints and the longest prefill chunk."""
        if self.prefill_tokens is None:
            return self.constraints
        return (*self.constraints, Batch.of([(self.prefill_tokens, 0)]))


def batch_slots(
    layout: CacheLayout, batch: Batch, *, max_rewind_tokens: int | None = None, any_alignment: bool = False
) -> tuple[int, ...]:
    """Slots per pool group that a batch holds.

    Args:
        max_rewind_tokens: blocks of a prompt that leave their window within the step lie in scratch slots, and this
            many tokens may be rewound; None: without scratch.
        any_alignment: charge every window with the block it may straddle, as the requests get it while they move on,
            instead of what they hold at exactly these cursors.

    Source: pools specification 3.4.
    """
    counts = []
    for member in layout.life_cycles:
        need = _Need(member, batch, layout.tokens_per_block, any_alignment)
        counts.append(np.asarray(need.total(max_rewind_tokens)))
    return tuple(int(total) for total in per_group(layout, counts))


class _Need:
    """Slots of one life cycle for a batch."""

    def __init__(self, member: LifeCycleLayout, batch: Batch, tokens_per_block: int, any_alignment: bool) -> None:
        self._member = member
        self._steps = batch.steps
        self._tokens_per_block = tokens_per_block
        self._any_alignment = any_alignment
        self._shared = batch.shared_tokens // tokens_per_block if batch.requests else 0

    def total(self, max_rewind_tokens: int | None) -> int:
        if self._member.life_cycle.recurrent:
            return len(self._steps.history)
        start, end = self._member.life_cycle.stale_bounds(self._steps.history, self._tokens_per_block)
        start, end = np.minimum(start, self._shared), np.minimum(end, self._shared)
        own = np.maximum(0, self._live() - (self._shared - (end - start)))
        if max_rewind_tokens is not None:
            own = self._with_scratch(own, max_rewind_tokens)
        # A shared block is free to go when all requests have left it behind.
        unneeded = max(0, int(end.min(initial=self._shared)) - int(start.max(initial=0)))
        return self._shared - unneeded + int(own.sum())

    def _live(self) -> Counts:
        life_cycle, steps = self._member.life_cycle, self._steps
        if self._any_alignment:
            return _longest_lives(life_cycle, steps, self._tokens_per_block)
        return life_cycle.live_counts(steps.history, steps.capacity, self._tokens_per_block)

    def _with_scratch(self, own: Counts, max_rewind_tokens: int) -> Counts:
        scratch = scratch_counts(
            self._member.life_cycle,
            self._steps,
            self._tokens_per_block,
            max_rewind_tokens,
            from_block=self._shared,
        )
        return own - scratch + scratch_slots(self._member, scratch)


def _longest_lives(life_cycle: LifeCycle, steps: Steps, tokens_per_block: int) -> Counts:
    """The most pages each request holds while it grows to its capacity with this lead. Shapes: [num_requests]."""
    blocks: Counts = -(-steps.capacity // tokens_per_block)
    leads = (steps.capacity - steps.history).tolist()
    bounds = {lead: life_cycle.max_live_blocks(lead, tokens_per_block) for lead in set(leads)}
    limits = [
        block if bounds[lead] is None else bounds[lead] for block, lead in zip(blocks.tolist(), leads, strict=True)
    ]
    return np.minimum(blocks, np.array(limits, np.int64))


def slots_with_resume_room(num_slots: int, max_util_for_resume: float) -> int:
    """The fewest slots of which `num_slots` are no more than the share that the resume gate allows to be in use."""
    total = max(num_slots, math.floor(num_slots / max_util_for_resume))
    # The gate compares quotients of floats: settle on the same side of it.
    while num_slots / total > max_util_for_resume:
        total += 1
    return total


def workload_floors(layout: CacheLayout, workload: Workload) -> tuple[int, ...]:
    """Fewest slots per pool group: one sequence can always move, and every batch that must fit does, and is resumed.

    Source: pools specification 3.5.
    """
    floors = list(slot_floors(layout))
    for batch in workload.must_fit:
        needs = batch_slots(layout, batch, max_rewind_tokens=workload.max_rewind_tokens, any_alignment=True)
        roomy = [slots_with_resume_room(max(1, need), workload.max_util_for_resume) for need in needs]
        floors = [max(pair) for pair in zip(floors, roomy, strict=True)]
    return tuple(floors)


def workload_weights(layout: CacheLayout, workload: Workload, *, grain_bytes: int = 4096) -> tuple[float, ...]:
    """How the bytes are shared over the pool groups, summing to 1.

    Raises:
        ConfigError: the workload's ratio has not one positive share per life cycle, or does not sum to 1.

    Source: pools specification 3.3.
    """
    if workload.ratio is not None:
        check_shares("pool ratio", workload.ratio, len(layout.life_cycles), "life cycle")
        sums = [math.fsum(workload.ratio[index] for index in group.life_cycles) for group in layout.pool_groups]
        return _normalised(sums)
    if workload.typical is None and workload.constraints:
        slots = workload_floors(layout, workload)
    else:
        batch = workload.typical or FALLBACK_BATCH
        slots = batch_slots(layout, batch, max_rewind_tokens=workload.max_rewind_tokens, any_alignment=True)
    return _normalised(slots_bytes(layout, [max(1, count) for count in slots], grain_bytes=grain_bytes))


def _normalised(values: Sequence[float]) -> tuple[float, ...]:
    total = math.fsum(values)
    return tuple(value / total for value in values)


def slots_bytes(layout: CacheLayout, num_slots: Sequence[int], *, grain_bytes: int = 4096) -> tuple[int, ...]:
    """Bytes per pool group that so many slots take, every pool rounded up to whole grains."""
    return tuple(
        grains(count, group.pool_bytes, grain_bytes) * grain_bytes
        for count, group in zip(num_slots, layout.pool_groups, strict=True)
    )


def size_pools(
    layout: CacheLayout,
    quota_bytes: int,
    workload: Workload,
    *,
    grain_bytes: int = 4096,
    raise_quota_to_floor: bool = False,
) -> tuple[int, ...]:
    """Slots per pool group that a byte budget pays for under this workload.

    Raises:
        ConfigError: the workload does not fit the layout, or the budget is below its floors (with the numbers).
    """
    return divide_quota(
        layout,
        quota_bytes,
        workload_weights(layout, workload, grain_bytes=grain_bytes),
        floors=workload_floors(layout, workload),
        grain_bytes=grain_bytes,
        raise_quota_to_floor=raise_quota_to_floor,
    )


@dataclass(frozen=True)
class ServingLimits:
    """What a serving loop is configured to run.

    Attributes:
        max_batch: sequences that run at once.
        max_step_tokens: prompt tokens computed in one step.
        draft_tokens: length of a draft; 0 without speculation.
        extra_tokens: tokens by which capacity leads history between steps.
        average_tokens: how long sequences are on average; None when not known.
    """

    max_batch: int
    max_seq_len_tokens: int
    max_step_tokens: int
    draft_tokens: int = 0
    extra_tokens: int = 0
    average_tokens: int | None = None


def serving_workload(
    limits: ServingLimits,
    *,
    ratio: tuple[float, ...] | None = None,
    max_util_for_resume: float = 1.0,
    max_rewind_tokens: int | None = None,
) -> Workload:
    """The workload of a serving loop.

    The longest prefill chunk must always fit. With an average length, the typical batch is one chunk beside decoding
    sequences of that length, and one sequence of the greatest length beside others that just begin must fit. A ratio
    decides the weights but lifts no floor.

    Raises:
        ConfigError: the average length is above the greatest.

    Source: pools specification 3.5.
    """
    chunk_tokens = limits.max_step_tokens + limits.extra_tokens
    known = Workload(
        ratio=ratio,
        prefill_tokens=chunk_tokens,
        max_util_for_resume=max_util_for_resume,
        max_rewind_tokens=max_rewind_tokens,
    )
    if limits.average_tokens is None:
        return known
    average, longest, others = limits.average_tokens, limits.max_seq_len_tokens, limits.max_batch - 1
    if average > longest:
        raise ConfigError(
            f"average_tokens is {average}, above max_seq_len_tokens {longest}: lower one or raise the other"
        )
    decoding = (average, max(0, average - limits.draft_tokens - 1))
    beginning = (1 + limits.draft_tokens + limits.extra_tokens, 0)
    typical = Batch.of([(chunk_tokens, 0)] + [decoding] * others)
    longest_beside_others = Batch.of([(longest, longest - 1)] + [beginning] * others)
    return replace(known, typical=typical, constraints=(longest_beside_others,))
