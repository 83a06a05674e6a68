"""Who sends which bytes where, for two ranks whose slots have the same layout.

Runs are worked out once per pair; a request then costs two index arrays. With equal layouts a page is one run in each
pool of its group: index = position of the slot in the concatenation of all pools, the same rule on both sides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.errors import RemoteProtocolError
from kvferry.cache.lifecycle import ceil_div
from kvferry.cache.page_table import BlockLists, LayerGroupEntry, PageTable, PoolEntry, SlotList

Indices = npt.NDArray[np.int32]


class Slice(NamedTuple):
    """A part of a transfer that is posted at once. Shapes: local and remote are [n], positions in the run lists."""

    local: Indices
    remote: Indices
    num_bytes: int


@dataclass(frozen=True)
class TransferPlan:
    """What one request moves: paired runs and their sizes. Shapes: all [num_runs].

    Attributes:
        num_pages: a page has a run in each pool of its group.
    """

    local: Indices
    remote: Indices
    run_bytes: npt.NDArray[np.int64]
    num_pages: int

    @property
    def num_runs(self) -> int:
        return len(self.local)

    @property
    def num_bytes(self) -> int:
        return int(self.run_bytes.sum())

    def slices(self, slice_bytes: int) -> Iterator[Slice]:
        """Cut into consecutive parts of at most `slice_bytes`, or of one run where a run is larger."""
        start = 0
        ends = np.cumsum(self.run_bytes)
        while start < self.num_runs:
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + slice_bytes, side="right")))
            yield Slice(self.local[start:stop], self.remote[start:stop], int(ends[stop - 1]) - before)
            start = stop


def groups_of(pages: BlockLists) -> tuple[int, ...]:
    """Indices of the layer groups that have a page."""
    return tuple(index for index, slots in enumerate(pages.slots) if (slots >= 0).any())


def check_same_blocks(granted: BlockLists, permitted: BlockLists) -> None:
    """Raise RemoteProtocolError unless exactly the blocks with a granted page have a permitted one."""
    for index, (ours, theirs) in enumerate(zip(granted.slots, permitted.slots, strict=True)):
        differing = np.flatnonzero((ours >= 0) != (theirs >= 0))
        if len(differing):
            raise RemoteProtocolError(
                f"group {index}: permit and grant name different blocks: {differing[:8].tolist()}"
            )


def run_list(pools: tuple[PoolEntry, ...], device_index: int = 0) -> npt.NDArray[np.uint64]:
    """Every slot of every pool as one run. Shapes: [total slots, 3], columns address, bytes, device index."""
    parts = []
    for pool in pools:
        part = np.empty((pool.num_slots, 3), np.uint64)
        part[:, 0] = pool.base + np.arange(pool.num_slots, dtype=np.uint64) * np.uint64(pool.slot_stride)
        part[:, 1] = pool.slot_bytes
        part[:, 2] = device_index
        parts.append(part)
    return np.concatenate(parts)


class PairPlanner:
    """Plans transfers from the local rank to one remote rank with an equal layout."""

    def __init__(self, local: PageTable, remote: PageTable) -> None:
        assert local.layout_digest == remote.layout_digest, "compatibility.check refuses unequal layouts"
        self._local = local
        self._remote = remote
        self._local_starts = _pool_starts(local)
        self._remote_starts = _pool_starts(remote)

    def check_pages(self, prompt_tokens: int, pages: BlockLists) -> None:
        """Raise RemoteProtocolError unless the peer's lists cover the prompt and name slots of its own pools."""
        blocks = ceil_div(prompt_tokens, self._remote.tokens_per_block)
        if len(pages.slots) != len(self._remote.layer_groups):
            raise RemoteProtocolError(f"{len(pages.slots)} block lists for {len(self._remote.layer_groups)} groups")
        for index, (slots, group) in enumerate(zip(pages.slots, self._remote.layer_groups, strict=True)):
            # A slot id names a slot in every pool of the group, so the smallest pool is the bound.
            num_slots = min(self._remote.pools[pool].num_slots for pool in group.pools)
            if len(slots) != blocks:
                raise RemoteProtocolError(f"group {index}: {len(slots)} entries, {prompt_tokens} tokens need {blocks}")
            if len(slots) and (int(slots.min()) < -1 or int(slots.max()) >= num_slots):
                raise RemoteProtocolError(f"group {index}: slots {slots.min()}..{slots.max()} of {num_slots}")
        self._check_distinct(pages)

    def plan(self, local: BlockLists, remote: BlockLists) -> TransferPlan:
        """Pair the pages of a request: ordinal o moves iff the remote side has a page for it.

        Raises:
            RemoteProtocolError: the remote side wants a page that does not exist here; moving the rest would leave it
                with bytes of an earlier request.
        """
        ours, theirs, sizes = [_NO_RUNS], [_NO_RUNS], [np.empty(0, np.int64)]
        num_pages = 0
        for index, (group, peer) in enumerate(zip(self._local.layer_groups, self._remote.layer_groups, strict=True)):
            source, target = _wanted(index, group, local.slots[index], remote.slots[index])
            num_pages += len(target)
            # Pool by pool: neighbouring slots stay neighbouring runs, which the transport merges.
            for pool, peer_pool in zip(group.pools, peer.pools, strict=True):
                ours.append(source + self._local_starts[pool])
                theirs.append(target + self._remote_starts[peer_pool])
                sizes.append(np.full(len(source), self._local.pools[pool].slot_bytes, np.int64))
        return TransferPlan(_concat(ours), _concat(theirs), np.concatenate(sizes), num_pages)

    def permit(self, local: BlockLists, wanted: BlockLists) -> BlockLists:
        """Our pages of the blocks that the remote side has room for. Raises RemoteProtocolError as `plan`."""
        slots, epochs = [], []
        for index, group in enumerate(self._local.layer_groups):
            _wanted(index, group, local.slots[index], wanted.slots[index])
            taken = wanted.slots[index] >= 0
            slots.append(np.where(taken, local.slots[index], -1).astype(np.int32))
            epochs.append(np.where(taken, local.epochs[index], 0).astype(np.uint32))
        return BlockLists(tuple(slots), tuple(epochs))

    def _check_distinct(self, pages: BlockLists) -> None:
        """Over runs and not over slot ids, so that groups which share only some of their pools are seen too."""
        named = np.concatenate(
            [
                slots[slots >= 0].astype(np.int64) + self._remote_starts[pool]
                for slots, group in zip(pages.slots, self._remote.layer_groups, strict=True)
                for pool in group.pools
            ]
        )
        if len(np.unique(named)) != len(named):
            raise RemoteProtocolError("a slot is named twice: two blocks would be written to one page")


_NO_RUNS: Indices = np.empty(0, np.int32)


def _wanted(index: int, group: LayerGroupEntry, source: SlotList, target: SlotList) -> tuple[SlotList, SlotList]:
    """Slots here and there of the pages the remote side has room for."""
    wanted = target >= 0
    if (source[wanted] < 0).any():
        missing = np.flatnonzero(wanted & (source < 0)).tolist()
        raise RemoteProtocolError(f"group {index} ({group.life_cycle}): no page for blocks {missing}")
    return source[wanted], target[wanted]


def _pool_starts(table: PageTable) -> list[int]:
    counts = [pool.num_slots for pool in table.pools]
    return [sum(counts[:index]) for index in range(len(counts))]


def _concat(parts: list[Indices]) -> Indices:
    return np.concatenate(parts).astype(np.int32)
