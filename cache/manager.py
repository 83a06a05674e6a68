"""The V2 KV-cache manager: pools shared by life cycles, sequences that take pages from them, holds for transfers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvferry.cache.errors import CapacityError, ConfigError, InvariantError, LocalProtocolError
from kvferry.cache.layout import CacheLayout
from kvferry.cache.page_table import BlockLists, LayerGroupEntry, PageTable, PoolEntry, SlotList
from kvferry.cache.sequence import PageChange, SequenceCache
from kvferry.cache.slots import SlotAllocator
from kvferry.cache.storage import PoolStorage


class GroupUsage(NamedTuple):
    """Slots of one pool group. free + in_use == num_slots.

    Attributes:
        reserved: slots promised to open sequences, taken or not.
        held: slots that a hold keeps after their sequence gave them up, or beside it.
    """

    num_slots: int
    free: int
    in_use: int
    reserved: int
    held: int


@dataclass(frozen=True)
class Hold:
    """Pages that cannot become free before `KVCacheManager.release`. Shapes: slots[group] is [n], ids of that pool."""

    number: int
    slots: tuple[SlotList, ...]


class KVCacheManager:
    """Pools of one rank and the sequences living in them.

    A sequence is admitted with a reservation: the most slots it will ever hold at once, per pool group. Admission
    keeps the sum of what may still be taken within the pools, so a running sequence never fails for lack of pages.

    Concurrency: one thread, the engine's loop.
    """

    version = "V2"

    def __init__(self, layout: CacheLayout, num_slots: Sequence[int], device: str = "cpu") -> None:
        if len(num_slots) != len(layout.pool_groups) or any(count < 1 for count in num_slots):
            raise ConfigError(f"slots {list(num_slots)}: need {len(layout.pool_groups)} positive counts, one per group")
        self.layout = layout
        self.storage = PoolStorage(layout, num_slots, device)
        self._allocators = [SlotAllocator(count) for count in num_slots]
        self._sequences: set[SequenceCache] = set()
        self._holds: dict[int, Hold] = {}
        self._next_hold = 0

    # ---- layout and memory

    def buffer(self, layer_id: int, role: str) -> torch.Tensor:
        """One layer's buffer. Shapes: [num_slots, num_heads, tokens_per_block, head_dim], a view of the pool."""
        return self.storage.buffer(*self.layout.buffer(layer_id, role))

    def page_table(self) -> PageTable:
        """The frozen geometry that peers and the transceiver see."""
        pools = tuple(
            PoolEntry(pool.data_ptr(), group.slot_bytes, group.slot_bytes, allocator.num_slots)
            for pool, group, allocator in zip(
                self.storage.pools, self.layout.pool_groups, self._allocators, strict=True
            )
        )
        groups = tuple(
            LayerGroupEntry(group.life_cycle, group.pool_group, group.buffers) for group in self.layout.life_cycles
        )
        layout = self.layout
        return PageTable(layout.digest, layout.dtype, layout.tokens_per_block, str(self.storage.device), pools, groups)

    # ---- admission

    def check_fits_ever(self, reserve: Sequence[int]) -> None:
        """Raise CapacityError(permanent) with the numbers when even empty pools could not hold this reservation."""
        totals = [allocator.num_slots for allocator in self._allocators]
        if any(need > total for need, total in zip(reserve, totals, strict=True)):
            raise CapacityError(
                f"needs {list(reserve)} slots per pool group, the pools have {totals}: raise the pool quota or "
                "shorten the request",
                requested=reserve,
                available=totals,
                permanent=True,
            )

    def admissible(self) -> tuple[int, ...]:
        """Slots per pool group that a new reservation may still ask for."""
        return tuple(
            usage.num_slots - usage.reserved - orphaned
            for usage, orphaned in zip(self.usage(), self._orphaned(), strict=True)
        )

    def create_sequence(self, request_id: str, reserve: tuple[int, ...]) -> SequenceCache:
        """Admit a request whose peak need is `reserve` slots per pool group (`sizing.peak_slots`).

        Raises:
            CapacityError: not now, or (permanent) never; nothing changed.
        """
        self.check_fits_ever(reserve)
        available = self.admissible()
        if any(need > left for need, left in zip(reserve, available, strict=True)):
            raise CapacityError(
                f"request {request_id} needs {list(reserve)} slots per pool group, {list(available)} are not spoken "
                "for: retry after a release",
                requested=reserve,
                available=available,
            )
        sequence = SequenceCache(self, request_id, reserve)
        self._sequences.add(sequence)
        return sequence

    # ---- pages (called by SequenceCache)

    def apply(self, sequence: SequenceCache, changes: Sequence[PageChange]) -> None:
        """Release and take the pages of one resize, filling the new ids into `changes[i].table`. All or nothing."""
        self._check_feasible(sequence, changes)
        for group, change in zip(self.layout.life_cycles, changes, strict=True):
            self._allocators[group.pool_group].drop_user(change.released)
        for group, change in zip(self.layout.life_cycles, changes, strict=True):
            change.table[change.ordinals] = self._allocators[group.pool_group].acquire(len(change.ordinals))

    def with_epochs(self, slots: tuple[SlotList, ...]) -> BlockLists:
        """Add the epoch of every slot (0 for no page) to the slot lists of one sequence."""
        epochs = []
        for group, table in zip(self.layout.life_cycles, slots, strict=True):
            stamped = np.zeros(len(table), np.uint32)
            stamped[table >= 0] = self._allocators[group.pool_group].epochs(table[table >= 0])
            epochs.append(stamped)
        return BlockLists(slots, tuple(epochs))

    def forget(self, sequence: SequenceCache) -> None:
        """Take back all pages of a sequence that closes."""
        for group in self.layout.life_cycles:
            table = sequence.slots(group.id)
            self._allocators[group.pool_group].drop_user(table[table >= 0])
        self._sequences.remove(sequence)

    # ---- holds (called for transfers)

    def hold(self, pages: BlockLists) -> Hold:
        """Keep pages from becoming free, whatever their sequence does, until `release`."""
        slots = self._by_pool_group(pages.slots)
        for allocator, ids in zip(self._allocators, slots, strict=True):
            allocator.add_user(ids)
        hold = Hold(self._next_hold, slots)
        self._next_hold += 1
        self._holds[hold.number] = hold
        return hold

    def release(self, hold: Hold) -> None:
        """End a hold. Raises LocalProtocolError when it already ended."""
        if self._holds.pop(hold.number, None) is None:
            raise LocalProtocolError(f"hold {hold.number} was already released")
        for allocator, ids in zip(self._allocators, hold.slots, strict=True):
            allocator.drop_user(ids)

    # ---- books

    def usage(self) -> tuple[GroupUsage, ...]:
        """The books of every pool group now."""
        reserved = np.sum([s.reserved for s in self._sequences] or [(0,) * len(self._allocators)], axis=0)
        return tuple(
            GroupUsage(a.num_slots, a.num_free, a.num_slots - a.num_free, int(reserved[g]), self._held(g))
            for g, a in enumerate(self._allocators)
        )

    def check_integrity(self) -> None:
        """Raise InvariantError unless every slot's users are exactly the sequences and holds that list it."""
        for sequence in self._sequences:
            self._check_sequence(sequence)
        for index, allocator in enumerate(self._allocators):
            allocator.check_integrity()
            expected = self._count_users(index, allocator.num_slots)
            wrong = np.flatnonzero(expected != allocator.users())
            if len(wrong):
                raise InvariantError(
                    f"pool group {index}: slots {wrong.tolist()} have {allocator.users()[wrong].tolist()} users, "
                    f"sequences and holds account for {expected[wrong].tolist()}"
                )

    # ---- private

    def _check_feasible(self, sequence: SequenceCache, changes: Sequence[PageChange]) -> None:
        need = [0] * len(self._allocators)
        gain = [allocator.num_free for allocator in self._allocators]
        for group, change in zip(self.layout.life_cycles, changes, strict=True):
            need[group.pool_group] += len(change.ordinals)
            gain[group.pool_group] += self._allocators[group.pool_group].last_users(change.released)
        if any(n > g for n, g in zip(need, gain, strict=True)):
            raise CapacityError(
                f"request {sequence.request_id} needs {need} new slots per pool group, {gain} can be given: "
                "retry after a release",
                requested=need,
                available=gain,
            )

    def _by_pool_group(self, tables: Sequence[SlotList]) -> tuple[SlotList, ...]:
        parts: list[list[SlotList]] = [[] for _ in self._allocators]
        for group, table in zip(self.layout.life_cycles, tables, strict=True):
            parts[group.pool_group].append(table[table >= 0])
        return tuple(np.concatenate(part) for part in parts)

    def _taken(self, sequence: SequenceCache) -> tuple[int, ...]:
        tables = [sequence.slots(group.id) for group in self.layout.life_cycles]
        return tuple(len(ids) for ids in self._by_pool_group(tables))

    def _count_users(self, index: int, num_slots: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        tables = [[s.slots(group.id) for group in self.layout.life_cycles] for s in self._sequences]
        lists = [self._by_pool_group(table)[index] for table in tables]
        lists += [hold.slots[index] for hold in self._holds.values()]
        return np.bincount(np.concatenate([*lists, np.empty(0, np.int32)]), minlength=num_slots)

    def _held(self, index: int) -> int:
        held = [hold.slots[index] for hold in self._holds.values()]
        return len(np.unique(np.concatenate([*held, np.empty(0, np.int32)])))

    def _orphaned(self) -> list[int]:
        """Slots per pool group that holds keep although no open sequence lists them."""
        taken = np.sum([self._taken(s) for s in self._sequences] or [(0,) * len(self._allocators)], axis=0)
        return [a.num_slots - a.num_free - int(taken[g]) for g, a in enumerate(self._allocators)]

    def _check_sequence(self, sequence: SequenceCache) -> None:
        story = f"sequence {sequence.request_id}"
        if not 0 <= sequence.committed <= sequence.history <= sequence.capacity:
            raise InvariantError(f"{story}: {sequence.committed=} {sequence.history=} {sequence.capacity=}")
        for group in self.layout.life_cycles:
            table, p = sequence.slots(group.id), self.layout.tokens_per_block
            live = group.life_cycle.live_blocks(sequence.history, sequence.capacity, p)
            stale = group.life_cycle.stale_range(sequence.history, p).clipped(len(table))
            pages = int((table >= 0).sum())
            if pages != live or (table[stale.start : stale.end] >= 0).any():
                raise InvariantError(f"{story}, {group.life_cycle}: {pages} pages, {live} expected, stale is {stale}")
