"""The geometry of a rank's pools. Whatever a peer says of it is checked before an address is computed from it."""

import math
import re

from kvferry.cache.ids import LayerId
from kvferry.cache.layout import BufferView, StateView
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.page_table import LayerGroupEntry, PageTable, PoolEntry
from kvferry.cache.spec import ITEM_BYTES
from kvferry.transfer.control.convert import checks
from kvferry.v1 import peer_pb2 as pb

MAX_POOLS = 256
MAX_LAYER_GROUPS = 256
MAX_PARTS = 1 << 14
"""Buffers, and states, of one layer group."""
MAX_TOKENS_PER_BLOCK = 1 << 16
MAX_SLOTS = 1 << 24
"""Slots of all pools together: whoever pairs keeps a row for each."""
MAX_HEADS = 1 << 16
MAX_STATE_DIMS = 8
MAX_STATE_SIZE = 1 << 31
ADDRESS_SPACE_BYTES = 1 << 64
_DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?")


def page_table_to_wire(table: PageTable) -> pb.PageTable:
    return pb.PageTable(
        layout_digest=table.layout_digest,
        dtype=table.dtype,
        tokens_per_block=table.tokens_per_block,
        device=table.device,
        pools=[_pool_to_wire(pool) for pool in table.pools],
        layer_groups=[_layer_group_to_wire(group) for group in table.layer_groups],
    )


def _device(device: str) -> str:
    checks.require(_DEVICE.fullmatch(device) is not None, "PageTable.device", device, "it is cpu, cuda or cuda:N")
    return device


def page_table_from_wire(message: pb.PageTable) -> PageTable:
    checks.sized("PageTable.layer_groups", message.layer_groups, low=1, high=MAX_LAYER_GROUPS)
    tokens = checks.count("PageTable.tokens_per_block", message.tokens_per_block, low=1, high=MAX_TOKENS_PER_BLOCK)
    pools = _pools_from_wire(message)
    geometry = _Geometry(pools, tokens)
    return PageTable(
        layout_digest=checks.name("PageTable.layout_digest", message.layout_digest),
        dtype=_dtype("PageTable.dtype", message.dtype),
        tokens_per_block=tokens,
        device=_device(message.device),
        pools=pools,
        layer_groups=tuple(geometry.layer_group(group) for group in message.layer_groups),
    )


def _dtype(field: str, value: str) -> str:
    checks.require(value in ITEM_BYTES, field, value, f"use one of {', '.join(ITEM_BYTES)}")
    return value


def _pool_to_wire(pool: PoolEntry) -> pb.Pool:
    return pb.Pool(
        base=pool.base, slot_bytes=pool.slot_bytes, slot_stride_bytes=pool.slot_stride, num_slots=pool.num_slots
    )


def _pools_from_wire(message: pb.PageTable) -> tuple[PoolEntry, ...]:
    checks.sized("PageTable.pools", message.pools, low=1, high=MAX_POOLS)
    pools = tuple(_pool_from_wire(pool) for pool in message.pools)
    total = sum(pool.num_slots for pool in pools)
    checks.require(total <= MAX_SLOTS, "PageTable.pools", f"{total} slots", f"at most {MAX_SLOTS} are allowed")
    return pools


def _pool_from_wire(message: pb.Pool) -> PoolEntry:
    slot_bytes = checks.count("Pool.slot_bytes", message.slot_bytes, low=1)
    stride = checks.count("Pool.slot_stride_bytes", message.slot_stride_bytes, low=slot_bytes)
    num_slots = checks.count("Pool.num_slots", message.num_slots, low=1, high=MAX_SLOTS)
    end = message.base + stride * num_slots
    checks.require(end <= ADDRESS_SPACE_BYTES, "Pool.base", message.base, f"its last slot ends at {end}, past 2^64")
    return PoolEntry(message.base, slot_bytes, stride, num_slots)


def _layer_group_to_wire(group: LayerGroupEntry) -> pb.LayerGroup:
    return pb.LayerGroup(
        window_tokens=group.life_cycle.window or 0,
        sink_blocks=group.life_cycle.sink_blocks,
        recurrent=group.life_cycle.recurrent,
        pools=group.pools,
        buffers=[_buffer_to_wire(view) for view in group.buffers],
        states=[_state_to_wire(view) for view in group.states],
    )


def _buffer_to_wire(view: BufferView) -> pb.Buffer:
    return pb.Buffer(
        layer_id=view.layer_id,
        role=view.role,
        offset_bytes=view.offset_bytes,
        num_heads=view.num_heads,
        head_dim=view.head_dim,
        head_stride_bytes=view.head_stride_bytes,
        token_stride_bytes=view.token_stride_bytes,
        dtype=view.dtype,
        pool=view.pool,
    )


def _state_to_wire(view: StateView) -> pb.State:
    return pb.State(
        layer_id=view.layer_id,
        role=view.role,
        offset_bytes=view.offset_bytes,
        shape=view.shape,
        dtype=view.dtype,
    )


class _Geometry:
    """Checks layer groups against the pools and the block size of their table."""

    def __init__(self, pools: tuple[PoolEntry, ...], tokens_per_block: int) -> None:
        self._pools = pools
        self._tokens_per_block = tokens_per_block

    def layer_group(self, message: pb.LayerGroup) -> LayerGroupEntry:
        life_cycle = _life_cycle(message)
        indices = self._pool_indices(message)
        sizes = [self._pools[index].slot_bytes for index in indices]
        return LayerGroupEntry(
            life_cycle,
            indices,
            tuple(self._buffer(view, sizes) for view in message.buffers),
            tuple(_state(view, sizes[0]) for view in message.states),
        )

    def _pool_indices(self, message: pb.LayerGroup) -> tuple[int, ...]:
        # The states of a recurrent group lie in one pool.
        most = 1 if message.recurrent else len(self._pools)
        checks.sized("LayerGroup.pools", message.pools, low=1, high=most)
        indices = tuple(checks.count("LayerGroup.pools", index, high=len(self._pools) - 1) for index in message.pools)
        checks.require(len(set(indices)) == len(indices), "LayerGroup.pools", indices, "they must be distinct")
        counts = [self._pools[index].num_slots for index in indices]
        rule = f"they have {counts} slots: one slot id must name a slot in each"
        checks.require(len(set(counts)) == 1, "LayerGroup.pools", indices, rule)
        return indices

    def _buffer(self, message: pb.Buffer, pool_bytes: list[int]) -> BufferView:
        pool = checks.count("Buffer.pool", message.pool, high=len(pool_bytes) - 1)
        dtype = _dtype("Buffer.dtype", message.dtype)
        num_heads = checks.count("Buffer.num_heads", message.num_heads, low=1, high=MAX_HEADS)
        row_bytes = checks.count("Buffer.head_dim", message.head_dim, low=1, high=MAX_HEADS) * ITEM_BYTES[dtype]
        token_stride = checks.count("Buffer.token_stride_bytes", message.token_stride_bytes, low=row_bytes)
        head_stride = checks.count("Buffer.head_stride_bytes", message.head_stride_bytes, low=1)
        last_token = (num_heads - 1) * head_stride + (self._tokens_per_block - 1) * token_stride
        _check_inside("Buffer", message.offset_bytes, last_token + row_bytes, pool_bytes[pool])
        return BufferView(
            layer_id=LayerId(message.layer_id),
            role=checks.name("Buffer.role", message.role),
            offset_bytes=message.offset_bytes,
            num_heads=num_heads,
            head_dim=message.head_dim,
            head_stride_bytes=head_stride,
            token_stride_bytes=token_stride,
            dtype=dtype,
            pool=pool,
        )


def _state(message: pb.State, slot_bytes: int) -> StateView:
    dtype = _dtype("State.dtype", message.dtype)
    checks.sized("State.shape", message.shape, low=1, high=MAX_STATE_DIMS)
    shape = tuple(checks.count("State.shape", size, low=1, high=MAX_STATE_SIZE) for size in message.shape)
    _check_inside("State", message.offset_bytes, math.prod(shape) * ITEM_BYTES[dtype], slot_bytes)
    return StateView(
        layer_id=LayerId(message.layer_id),
        role=checks.name("State.role", message.role),
        offset_bytes=message.offset_bytes,
        shape=shape,
        dtype=dtype,
    )


def _check_inside(part: str, offset_bytes: int, num_bytes: int, slot_bytes: int) -> None:
    end = offset_bytes + num_bytes
    rule = f"it ends at {end}, past the slot's {slot_bytes} bytes"
    checks.require(end <= slot_bytes, f"{part}.offset_bytes", offset_bytes, rule)


def _life_cycle(message: pb.LayerGroup) -> LifeCycle:
    """What the life cycle is, and that the group has the parts such a life cycle has."""
    window, sinks, recurrent = message.window_tokens, message.sink_blocks, message.recurrent
    checks.require(bool(window) or not sinks, "LayerGroup.sink_blocks", sinks, "sinks need a window")
    checks.require(not (recurrent and window), "LayerGroup.window_tokens", window, "a recurrent group has no window")
    _check_parts("LayerGroup.buffers", len(message.buffers), wanted=not recurrent)
    _check_parts("LayerGroup.states", len(message.states), wanted=recurrent)
    return LifeCycle(window or None, sinks, recurrent)


def _check_parts(field: str, count: int, *, wanted: bool) -> None:
    """A recurrent group has states only, any other group buffers only."""
    low, high = (1, MAX_PARTS) if wanted else (0, 0)
    checks.require(low <= count <= high, field, f"{count} elements", f"{low} to {high} are allowed in such a group")
