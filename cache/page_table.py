"""What a rank publishes about its pools, frozen: all that the transfer side may know of the cache."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.layout import BufferView, StateView
from kvferry.cache.lifecycle import LifeCycle

SlotList = npt.NDArray[np.int32]
"""Positional block list of one layer group. Shapes: [num_blocks]; entry = slot id, or -1 where no page exists."""

EpochList = npt.NDArray[np.uint32]
"""Epoch of each slot of a SlotList, 0 where no page exists. Shapes: [num_blocks]."""


@dataclass(frozen=True)
class PoolEntry:
    """One pool: address of slot s is base + s * slot_stride, valid for num_slots slots of slot_bytes."""

    base: int
    slot_bytes: int
    slot_stride: int
    num_slots: int


@dataclass(frozen=True)
class LayerGroupEntry:
    """One life cycle: which pools its slots lie in, under one slot id, and what lies where inside them.

    Attributes:
        pools: indices into the page table's pools; `BufferView.pool` counts along these.
        states: only of the recurrent life cycle, which has no buffers.
    """

    life_cycle: LifeCycle
    pools: tuple[int, ...]
    buffers: tuple[BufferView, ...]
    states: tuple[StateView, ...] = ()


@dataclass(frozen=True)
class PageTable:
    """The geometry of one rank's pools.

    Valid while: the manager that made it is open; base addresses never move.
    """

    layout_digest: str
    dtype: str
    tokens_per_block: int
    device: str
    pools: tuple[PoolEntry, ...]
    layer_groups: tuple[LayerGroupEntry, ...]


class BlockLists(NamedTuple):
    """The pages of one sequence: a SlotList and an EpochList per layer group, in the page table's order."""

    slots: tuple[SlotList, ...]
    epochs: tuple[EpochList, ...]

    @property
    def num_pages(self) -> int:
        return sum(int((slots >= 0).sum()) for slots in self.slots)

    @property
    def num_blocks(self) -> int:
        return max((len(slots) for slots in self.slots), default=0)
