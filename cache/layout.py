"""Where every byte of a page lies. Built once from a model spec; everything else obeys it.

A slot holds one block (tokens_per_block tokens) of *all* layers of one life cycle, contiguous, so that a page moves
as one run. Life cycles whose slots have the same size share a pool group: their slots are interchangeable.

    slot, layer_major:   [layer][buffer][head][token][dim]
    slot, head_major:    [head][layer][buffer][token][dim]      a re-split over heads stays one run
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from kvferry.cache.errors import ConfigError
from kvferry.cache.ids import LayerId, LifeCycleId, PoolGroupId
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec

SlotOrder = Literal["layer_major", "head_major"]


@dataclass(frozen=True)
class BufferView:
    """One layer's buffer inside a slot.

    Shapes: [num_heads, tokens_per_block, head_dim], dims strided by head_stride_bytes, token_stride_bytes, item_bytes.
    """

    layer_id: LayerId
    role: str
    offset_bytes: int
    num_heads: int
    head_dim: int
    head_stride_bytes: int
    token_stride_bytes: int


@dataclass(frozen=True)
class LifeCycleLayout:
    """The slot of one life cycle and the pool group it is taken from."""

    id: LifeCycleId
    life_cycle: LifeCycle
    pool_group: PoolGroupId
    slot_bytes: int
    buffers: tuple[BufferView, ...]

    @property
    def layer_ids(self) -> tuple[LayerId, ...]:
        return tuple(dict.fromkeys(buffer.layer_id for buffer in self.buffers))


@dataclass(frozen=True)
class PoolGroupLayout:
    """Slots of one size, shared by the life cycles listed."""

    id: PoolGroupId
    slot_bytes: int
    life_cycles: tuple[LifeCycleId, ...]


@dataclass(frozen=True)
class CacheLayout:
    """The frozen answer to "where do the bytes lie"."""

    model: str
    dtype: str
    item_bytes: int
    tokens_per_block: int
    order: SlotOrder
    life_cycles: tuple[LifeCycleLayout, ...]
    pool_groups: tuple[PoolGroupLayout, ...]

    def buffer(self, layer_id: int, role: str) -> tuple[LifeCycleLayout, BufferView]:
        """The life cycle and the view of one layer's buffer. Raises ConfigError when the layout has no such buffer."""
        for group in self.life_cycles:
            for view in group.buffers:
                if view.layer_id == layer_id and view.role == role:
                    return group, view
        raise ConfigError(f"layout of {self.model} has no buffer {role!r} of layer {layer_id}")

    @property
    def digest(self) -> str:
        """SHA-256 over everything that must agree between two workers whose slots are copied whole."""
        described = {key: value for key, value in asdict(self).items() if key != "model"}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def build_layout(spec: ModelSpec, *, tokens_per_block: int = 32, order: SlotOrder = "layer_major") -> CacheLayout:
    """Group layers by life cycle, lay out their slots and merge equal slot sizes into pool groups.

    Raises:
        ConfigError: tokens_per_block is below 1, or head_major is asked for layers with different head counts.
    """
    if tokens_per_block < 1:
        raise ConfigError(f"tokens_per_block is {tokens_per_block}: it must be at least 1")
    members: dict[LifeCycle, list[LayerSpec]] = {}
    for layer in spec.layers:
        members.setdefault(LifeCycle(layer.window), []).append(layer)
    arrange = {"layer_major": _layer_major, "head_major": _head_major}[order]
    groups: dict[int, PoolGroupId] = {}
    life_cycles = []
    for index, (life_cycle, layers) in enumerate(members.items()):
        buffers = tuple(arrange(layers, tokens_per_block, spec.item_bytes))
        slot_bytes = _slot_bytes(layers, tokens_per_block, spec.item_bytes)
        group = groups.setdefault(slot_bytes, PoolGroupId(len(groups)))
        life_cycles.append(LifeCycleLayout(LifeCycleId(index), life_cycle, group, slot_bytes, buffers))
    pool_groups = tuple(
        PoolGroupLayout(group, slot_bytes, tuple(lc.id for lc in life_cycles if lc.pool_group == group))
        for slot_bytes, group in groups.items()
    )
    return CacheLayout(spec.name, spec.dtype, spec.item_bytes, tokens_per_block, order, tuple(life_cycles), pool_groups)


def _slot_bytes(layers: list[LayerSpec], tokens_per_block: int, item_bytes: int) -> int:
    return sum(b.num_heads * b.head_dim for layer in layers for b in layer.buffers) * tokens_per_block * item_bytes


def _each_buffer(layers: list[LayerSpec]) -> Iterator[tuple[LayerId, BufferSpec]]:
    for layer in layers:
        for buffer in layer.buffers:
            yield layer.layer_id, buffer


def _layer_major(layers: list[LayerSpec], tokens_per_block: int, item_bytes: int) -> Iterator[BufferView]:
    offset = 0
    for layer_id, buffer in _each_buffer(layers):
        row = buffer.head_dim * item_bytes
        head = row * tokens_per_block
        yield BufferView(layer_id, buffer.role, offset, buffer.num_heads, buffer.head_dim, head, row)
        offset += head * buffer.num_heads


def _head_major(layers: list[LayerSpec], tokens_per_block: int, item_bytes: int) -> Iterator[BufferView]:
    counts = {buffer.num_heads for _, buffer in _each_buffer(layers)}
    if len(counts) > 1:
        raise ConfigError(f"head_major needs one head count per life cycle, found {sorted(counts)}: use layer_major")
    head = sum(buffer.head_dim for _, buffer in _each_buffer(layers)) * tokens_per_block * item_bytes
    offset = 0
    for layer_id, buffer in _each_buffer(layers):
        row = buffer.head_dim * item_bytes
        yield BufferView(layer_id, buffer.role, offset, buffer.num_heads, buffer.head_dim, head, row)
        offset += row * tokens_per_block
