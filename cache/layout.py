"""Where every byte of a page lies. Built once from a model spec; everything else obeys it.

A slot holds one block (tokens_per_block tokens) of *all* layers of one life cycle, contiguous, so that a page moves
as one run. Life cycles whose slots have the same sizes share a pool group: their slots are interchangeable.

    slot, layer_major:   [layer][buffer][head][token][dim]
    slot, head_major:    [head][layer][buffer][token][dim]      a re-split over heads stays one run

Buffers that kernels address from a base of their own lie in a second pool of the group, under the same slot ids. The
slot of the recurrent life cycle holds the states of a whole sequence instead of a block of tokens.
"""

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from kvferry.cache.errors import ConfigError
from kvferry.cache.ids import LayerId, LifeCycleId, PoolGroupId
from kvferry.cache.lifecycle import LifeCycle, ceil_div
from kvferry.cache.spec import ITEM_BYTES, BufferSpec, LayerSpec, ModelSpec, StateSpec

SlotOrder = Literal["layer_major", "head_major"]


@dataclass(frozen=True)
class BufferView:
    """One layer's buffer inside a slot.

    Shapes: [num_heads, tokens_per_block, head_dim], dims strided by head_stride_bytes, token_stride_bytes, item_bytes.

    Attributes:
        pool: which pool of the life cycle's group.
    """

    layer_id: LayerId
    role: str
    offset_bytes: int
    num_heads: int
    head_dim: int
    head_stride_bytes: int
    token_stride_bytes: int
    dtype: str
    pool: int = 0

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StateView:
    """One layer's recurrent state inside a slot, contiguous."""

    layer_id: LayerId
    role: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class LifeCycleLayout:
    """The slot of one life cycle and the pool group it is taken from.

    Attributes:
        pool_bytes: bytes of the slot in each pool of the group.
        sub_pages: equal, contiguous parts of a slot, one per layer; 1 when layers are not equal or not contiguous.
    """

    id: LifeCycleId
    life_cycle: LifeCycle
    pool_group: PoolGroupId
    pool_bytes: tuple[int, ...]
    buffers: tuple[BufferView, ...]
    states: tuple[StateView, ...] = ()
    sub_pages: int = 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page, all pools together."""
        return sum(self.pool_bytes)

    @property
    def layer_ids(self) -> tuple[LayerId, ...]:
        return tuple(dict.fromkeys([view.layer_id for view in self.buffers] + [view.layer_id for view in self.states]))


@dataclass(frozen=True)
class PoolGroupLayout:
    """Slots of the same sizes, shared by the life cycles listed. One slot id names a slot in each of its pools."""

    id: PoolGroupId
    pool_bytes: tuple[int, ...]
    life_cycles: tuple[LifeCycleId, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, all pools together."""
        return sum(self.pool_bytes)


@dataclass(frozen=True)
class CacheLayout:
    """The frozen answer to "where do the bytes lie"."""

    model: str
    dtype: str
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

    def state(self, layer_id: int, role: str) -> tuple[LifeCycleLayout, StateView]:
        """The life cycle and the view of one layer's recurrent state. Raises ConfigError when there is none."""
        for group in self.life_cycles:
            for view in group.states:
                if view.layer_id == layer_id and view.role == role:
                    return group, view
        raise ConfigError(f"layout of {self.model} has no state {role!r} of layer {layer_id}")

    @property
    def recurrent(self) -> LifeCycleLayout | None:
        """The life cycle of recurrent states, if the model has any."""
        return next((group for group in self.life_cycles if group.life_cycle.recurrent), None)

    @property
    def digest(self) -> str:
        """SHA-256 over everything that must agree between two workers whose slots are copied whole."""
        described = {key: value for key, value in asdict(self).items() if key != "model"}
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class _Part(NamedTuple):
    """What one layer keeps in one life cycle."""

    layer_id: LayerId
    buffers: tuple[BufferSpec, ...]
    states: tuple[StateSpec, ...]


def build_layout(spec: ModelSpec, *, tokens_per_block: int = 32, order: SlotOrder = "layer_major") -> CacheLayout:
    """The V2 layout: group layers by life cycle and merge life cycles with equal slots into pool groups.

    Raises:
        ConfigError: tokens_per_block is below 1, nothing is left to cache, or head_major is asked for layers with
            different head counts.

    Source: pools specification 3.1.
    """
    return _build(spec, tokens_per_block, order, lambda part: None, lambda life_cycle: life_cycle.pool_bytes, _tight)


def build_static_layout(
    spec: ModelSpec, *, tokens_per_block: int = 32, order: SlotOrder = "layer_major"
) -> CacheLayout:
    """The V1 layout: one pool for every pair of window and head count, never shared, rows padded to the longest.

    Raises: as `build_layout`.

    Source: pools specification 2.
    """
    heads: Callable[[_Part], Hashable] = lambda part: tuple(buffer.num_heads for buffer in part.buffers)  # noqa: E731
    return _build(spec, tokens_per_block, order, heads, lambda life_cycle: life_cycle.id, _padded)


RowBytes = Callable[[Sequence[_Part], BufferSpec, int], int]
"""Bytes from one token of a buffer to the next, given all that shares its slot and the bytes of one value."""


def _tight(parts: Sequence[_Part], buffer: BufferSpec, item_bytes: int) -> int:
    return buffer.head_dim * item_bytes


def _padded(parts: Sequence[_Part], buffer: BufferSpec, item_bytes: int) -> int:
    return (
        max(other.head_dim for part in parts for other in part.buffers if other.own_base == buffer.own_base)
        * item_bytes
    )


def _build(
    spec: ModelSpec,
    tokens_per_block: int,
    order: SlotOrder,
    split: Callable[[_Part], Hashable],
    share: Callable[[LifeCycleLayout], Hashable],
    row_bytes: RowBytes,
) -> CacheLayout:
    """Lay out slots; parts that differ in `split` are apart, life cycles equal in `share` take slots of one group."""
    if tokens_per_block < 1:
        raise ConfigError(f"tokens_per_block is {tokens_per_block}: it must be at least 1")
    members: dict[Hashable, tuple[LifeCycle, list[_Part]]] = {}
    for life_cycle, part in _parts(spec, tokens_per_block):
        members.setdefault((life_cycle, split(part)), (life_cycle, []))[1].append(part)
    if not members:
        raise ConfigError(f"model {spec.name} caches nothing: every buffer has no heads or no values")
    groups: dict[Hashable, PoolGroupId] = {}
    life_cycles = []
    for index, (life_cycle, parts) in enumerate(members.values()):
        slot = _Slot(spec, tokens_per_block, row_bytes)
        made = slot.lay_out(LifeCycleId(index), life_cycle, parts, order)
        group = groups.setdefault(share(made), PoolGroupId(len(groups)))
        life_cycles.append(LifeCycleLayout(**{**vars(made), "pool_group": group}))
    pool_groups = []
    for group in groups.values():
        inside = [life_cycle for life_cycle in life_cycles if life_cycle.pool_group == group]
        pool_groups.append(PoolGroupLayout(group, inside[0].pool_bytes, tuple(entry.id for entry in inside)))
    return CacheLayout(spec.name, spec.dtype, tokens_per_block, order, tuple(life_cycles), tuple(pool_groups))


def _parts(spec: ModelSpec, tokens_per_block: int) -> Iterator[tuple[LifeCycle, _Part]]:
    """What each layer keeps, in layer order; a layer with attention and a state belongs to two life cycles."""
    for layer in spec.layers:
        buffers = tuple(buffer for buffer in layer.buffers if buffer.num_heads and buffer.head_dim)
        if buffers:
            yield _life_cycle(layer, tokens_per_block), _Part(layer.layer_id, buffers, ())
        if layer.states:
            yield LifeCycle(recurrent=True), _Part(layer.layer_id, (), layer.states)


def _life_cycle(layer: LayerSpec, tokens_per_block: int) -> LifeCycle:
    return LifeCycle(layer.window, ceil_div(layer.sink_tokens, tokens_per_block))


class _Slot:
    """Places the parts of one life cycle."""

    def __init__(self, spec: ModelSpec, tokens_per_block: int, row_bytes: RowBytes) -> None:
        self._spec = spec
        self._tokens_per_block = tokens_per_block
        self._row_bytes = row_bytes

    def lay_out(
        self, index: LifeCycleId, life_cycle: LifeCycle, parts: list[_Part], order: SlotOrder
    ) -> LifeCycleLayout:
        none_yet = PoolGroupId(-1)
        if life_cycle.recurrent:
            states, size = self._states(parts)
            return LifeCycleLayout(index, life_cycle, none_yet, (size,), (), states)
        arrange = {"layer_major": self._layer_major, "head_major": self._head_major}[order]
        views: list[BufferView] = []
        sizes: list[int] = []
        for own_base in (False, True):
            inside = [(part.layer_id, b) for part in parts for b in part.buffers if b.own_base == own_base]
            if inside:
                placed, size = arrange(parts, inside, len(sizes))
                views += placed
                sizes.append(size)
        sub_pages = self._sub_pages(parts) if order == "layer_major" and len(sizes) == 1 else 1
        return LifeCycleLayout(index, life_cycle, none_yet, tuple(sizes), tuple(views), sub_pages=sub_pages)

    def _sub_pages(self, parts: list[_Part]) -> int:
        """One per layer when all layers keep the same."""
        return len(parts) if len({part.buffers for part in parts}) == 1 else 1

    def _dtype(self, dtype: str | None) -> tuple[str, int]:
        return dtype or self._spec.dtype, self._spec.item_bytes_of(dtype)

    def _states(self, parts: list[_Part]) -> tuple[tuple[StateView, ...], int]:
        views, offset, widest = [], 0, 1
        for part in parts:
            for state in part.states:
                dtype, item = self._dtype(state.dtype)
                offset, widest = _aligned(offset, item), max(widest, item)
                views.append(StateView(part.layer_id, state.role, offset, state.shape, dtype))
                offset += math.prod(state.shape) * item
        return tuple(views), _aligned(offset, widest)

    def _layer_major(
        self, parts: list[_Part], buffers: list[tuple[LayerId, BufferSpec]], pool: int
    ) -> tuple[list[BufferView], int]:
        views, offset, widest = [], 0, 1
        for layer_id, buffer in buffers:
            dtype, item = self._dtype(buffer.dtype)
            row = self._row_bytes(parts, buffer, item)
            head = row * self._tokens_per_block
            offset, widest = _aligned(offset, item), max(widest, item)
            views.append(
                BufferView(layer_id, buffer.role, offset, buffer.num_heads, buffer.head_dim, head, row, dtype, pool)
            )
            offset += head * buffer.num_heads
        return views, _aligned(offset, widest)

    def _head_major(
        self, parts: list[_Part], buffers: list[tuple[LayerId, BufferSpec]], pool: int
    ) -> tuple[list[BufferView], int]:
        counts = {buffer.num_heads for _, buffer in buffers}
        if len(counts) > 1:
            raise ConfigError(
                f"head_major needs one head count per life cycle, found {sorted(counts)}: use layer_major"
            )
        placed, offset, widest = [], 0, 1
        for layer_id, buffer in buffers:
            dtype, item = self._dtype(buffer.dtype)
            row = self._row_bytes(parts, buffer, item)
            offset, widest = _aligned(offset, item), max(widest, item)
            placed.append((layer_id, buffer, offset, row, dtype))
            offset += row * self._tokens_per_block
        head = _aligned(offset, widest)
        views = [
            BufferView(layer_id, buffer.role, start, buffer.num_heads, buffer.head_dim, head, row, dtype, pool)
            for layer_id, buffer, start, row, dtype in placed
        ]
        return views, head * counts.pop()


def _aligned(offset: int, item_bytes: int) -> int:
    return ceil_div(offset, item_bytes) * item_bytes
