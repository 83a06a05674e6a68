"""The bytes of the pools, on cpu or cuda."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import BufferView, CacheLayout, LifeCycleLayout


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
    """One uint8 tensor per pool group.

    Valid while: the object lives; base addresses never change, so a transport may register them.
    """

    def __init__(self, layout: CacheLayout, num_slots: Sequence[int], device: str) -> None:
        self.device = open_device(device)
        self._layout = layout
        self._check_memory(num_slots)
        self.pools = tuple(
            # Written, not just reserved: first use of untouched memory costs a page fault per 4 KiB.
            torch.empty(count * group.slot_bytes, dtype=torch.uint8, device=self.device).fill_(0)
            for group, count in zip(layout.pool_groups, num_slots, strict=True)
        )

    def buffer(self, group: LifeCycleLayout, view: BufferView) -> torch.Tensor:
        """One layer's buffer in every slot of its pool.

        Shapes: [num_slots, num_heads, tokens_per_block, head_dim], strided; writes go to the pool.
        """
        item = self._layout.item_bytes
        pool = self.pools[group.pool_group]
        strides = (group.slot_bytes, view.head_stride_bytes, view.token_stride_bytes, item)
        shape = (pool.numel() // group.slot_bytes, view.num_heads, self._layout.tokens_per_block, view.head_dim)
        return pool.view(torch_dtype(self._layout.dtype)).as_strided(
            shape, tuple(stride // item for stride in strides), view.offset_bytes // item
        )

    def _check_memory(self, num_slots: Sequence[int]) -> None:
        """Raise ConfigError when the device has not enough memory, before any of it is touched."""
        groups = zip(self._layout.pool_groups, num_slots, strict=True)
        needed = sum(count * group.slot_bytes for group, count in groups)
        available = available_bytes(self.device)
        if needed > available:
            raise ConfigError(
                f"the pools need {needed} bytes, {self.device} has {available} bytes of memory available: lower the "
                "pool quota"
            )

    def record_event(self) -> Callable[[], bool]:
        """Mark this point of the current stream; the result answers whether the device has reached it. Never waits."""
        if self.device.type != "cuda":
            return _always
        query: Callable[[], bool] = torch.cuda.current_stream(self.device).record_event().query
        return query


def _always() -> bool:
    return True
