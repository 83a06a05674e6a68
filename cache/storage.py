"""The bytes of the pools, on cpu or cuda."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import CacheLayout
from kvferry.cache.page_table import LayerGroupEntry, PageTable, PoolEntry


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a spec's dtype name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"torch has no dtype {name!r}")
    return dtype


def open_device(name: str) -> torch.device:
    """The device of that name, checked to exist. Raises ConfigError when this machine has no such device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known: use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is asked, this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device now; on cpu what the kernel estimates, without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kibibytes) * 1024


class PoolStorage:
    """One uint8 tensor per pool, the pools of a group next to each other in `pools`.

    On the device "meta" there are no bytes: books can be kept and capacities asked for pools of any size.

    Valid while: the object lives; base addresses never change, so a transport may register them.
    """

    def __init__(self, layout: CacheLayout, num_slots: Sequence[int], device: str) -> None:
        self.device = open_device(device)
        self.num_slots = tuple(num_slots)
        self._layout = layout
        self._check_memory()
        pools: list[torch.Tensor] = []
        firsts = []
        for group, count in zip(layout.pool_groups, num_slots, strict=True):
            firsts.append(len(pools))
            # Written, not just reserved: first use of untouched memory costs a page fault per 4 KiB.
            pools += [
                torch.empty(count * size, dtype=torch.uint8, device=self.device).fill_(0) for size in group.pool_bytes
            ]
        self.pools = tuple(pools)
        self._firsts = tuple(firsts)

    def pool_indices(self, pool_group: int) -> tuple[int, ...]:
        """Which of `pools` belong to a group."""
        first = self._firsts[pool_group]
        return tuple(range(first, first + len(self._layout.pool_groups[pool_group].pool_bytes)))

    def buffer(self, layer_id: int, role: str) -> torch.Tensor:
        """One layer's buffer in every slot of its pool.

        Shapes: [num_slots, num_heads, tokens_per_block, head_dim], strided; writes go to the pool.
        """
        group, view = self._layout.buffer(layer_id, role)
        num_slots, slot_bytes = self.num_slots[group.pool_group], group.pool_bytes[view.pool]
        shape = (num_slots, view.num_heads, self._layout.tokens_per_block, view.head_dim)
        strides = (slot_bytes, view.head_stride_bytes, view.token_stride_bytes, view.item_bytes)
        return self._view(group.pool_group, view.pool, view.dtype, shape, strides, view.offset_bytes)

    def paged_buffer(self, layer_id: int, role: str) -> torch.Tensor:
        """As `buffer`, but indexed by `SequenceCache.page_indices`: one entry per sub-page of every slot.

        Shapes: [num_slots * sub_pages, num_heads, tokens_per_block, head_dim], strided; writes go to the pool.
        """
        group, view = self._layout.buffer(layer_id, role)
        part = group.pool_bytes[view.pool] // group.sub_pages
        shape = (
            self.num_slots[group.pool_group] * group.sub_pages,
            view.num_heads,
            self._layout.tokens_per_block,
            view.head_dim,
        )
        strides = (part, view.head_stride_bytes, view.token_stride_bytes, view.item_bytes)
        return self._view(group.pool_group, view.pool, view.dtype, shape, strides, view.offset_bytes % part)

    def state(self, layer_id: int, role: str) -> torch.Tensor:
        """One layer's recurrent state in every slot. Shapes: [num_slots, *state shape]; writes go to the pool."""
        group, view = self._layout.state(layer_id, role)
        item = torch_dtype(view.dtype).itemsize
        sizes = [item]
        for size in reversed(view.shape[1:]):
            sizes.insert(0, sizes[0] * size)
        shape = (self.num_slots[group.pool_group], *view.shape)
        return self._view(group.pool_group, 0, view.dtype, shape, (group.pool_bytes[0], *sizes), view.offset_bytes)

    def page_table(self) -> PageTable:
        """The frozen geometry of these pools."""
        layout = self._layout
        pools = [
            PoolEntry(self.pools[index].data_ptr(), size, size, num_slots)
            for group, num_slots in zip(layout.pool_groups, self.num_slots, strict=True)
            for index, size in zip(self.pool_indices(group.id), group.pool_bytes, strict=True)
        ]
        groups = tuple(
            LayerGroupEntry(group.life_cycle, self.pool_indices(group.pool_group), group.buffers, group.states)
            for group in layout.life_cycles
        )
        device = str(self.device)
        return PageTable(layout.digest, layout.dtype, layout.tokens_per_block, device, tuple(pools), groups)

    def copy_slots(self, pool_group: int, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Copy whole slots inside a group, in the order of the current stream. Shapes: [n] both, no slot in both."""
        if self.device.type == "meta":
            return
        for index, size in zip(
            self.pool_indices(pool_group), self._layout.pool_groups[pool_group].pool_bytes, strict=True
        ):
            slots = self.pools[index].view(-1, size)
            slots[torch.from_numpy(targets.astype(np.int64))] = slots[torch.from_numpy(sources.astype(np.int64))]

    def record_event(self) -> Callable[[], bool]:
        """Mark this point of the current stream; the result answers whether the device has reached it. Never waits."""
        if self.device.type != "cuda":
            return _always
        query: Callable[[], bool] = torch.cuda.current_stream(self.device).record_event().query
        return query

    def _view(
        self,
        pool_group: int,
        pool: int,
        dtype: str,
        shape: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        offset_bytes: int,
    ) -> torch.Tensor:
        kind = torch_dtype(dtype)
        memory = self.pools[self.pool_indices(pool_group)[pool]].view(kind)
        strides = tuple(stride // kind.itemsize for stride in strides_bytes)
        return memory.as_strided(shape, strides, offset_bytes // kind.itemsize)

    def _check_memory(self) -> None:
        """Raise ConfigError when the device has not enough memory, before any of it is touched."""
        if self.device.type == "meta":
            return
        needed = sum(
            count * group.slot_bytes for group, count in zip(self._layout.pool_groups, self.num_slots, strict=True)
        )
        available = available_bytes(self.device)
        if needed > available:
            raise ConfigError(
                f"the pools need {needed} bytes, {self.device} has {available} bytes of memory available: lower the "
                "pool quota"
            )


def _always() -> bool:
    return True
