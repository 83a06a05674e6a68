"""A transformers cache whose keys and values live in the pools: scatter on write, dense gather on read.

What a layer returns is, to the bit, what transformers' own dynamic cache would return for the same chunks: everything
under full attention, the last window - 1 tokens and the new ones under a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import CacheLayout, LifeCycleLayout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.engines.paged import TokenSpan, first_visible_token


@dataclass(frozen=True)
class LayerBuffers:
    """One layer's views of the pool. Shapes: [num_slots, num_heads, tokens_per_block, head_dim] each."""

    layer_id: int
    group: LifeCycleLayout
    key: torch.Tensor
    value: torch.Tensor


def layer_buffers(manager: KVCacheManager) -> tuple[LayerBuffers, ...]:
    """The views of every layer, in layer order. Raises ConfigError when a layer has no key or no value buffer."""
    layout = manager.layout
    layer_ids = sorted(layer for group in layout.life_cycles for layer in group.layer_ids)
    return tuple(
        LayerBuffers(
            layer, layout.buffer(layer, "key")[0], manager.buffer(layer, "key"), manager.buffer(layer, "value")
        )
        for layer in layer_ids
    )


class _Step:
    """Where one life cycle's tokens are during one forward pass: shared by its layers."""

    def __init__(
        self, layout: CacheLayout, group: LifeCycleLayout, sequence: SequenceCache, num_new: int, device: torch.device
    ) -> None:
        self.history = sequence.history
        self.end = self.history + num_new
        first = first_visible_token(group.life_cycle, self.history)
        self.new, self.visible = (
            TokenSpan(sequence, group, start, self.end, tokens_per_block=layout.tokens_per_block, device=device)
            for start in (self.history, first)
        )


class PooledLayer(CacheLayerMixin):
    """One attention layer during one forward pass over one sequence."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, buffers: LayerBuffers, step: _Step) -> None:
        super().__init__()
        self._buffers = buffers
        self._step = step
        self._window = buffers.group.life_cycle.window
        self._length = step.history
        self.is_sliding = self._window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check that the model's keys and values are what the pools hold. Raises ConfigError with both shapes."""
        for role, states, buffer in (
            ("key", key_states, self._buffers.key),
            ("value", value_states, self._buffers.value),
        ):
            wanted = (1, buffer.shape[1], len(self._step.new), buffer.shape[3])
            if tuple(states.shape) != wanted or states.dtype != buffer.dtype:
                raise ConfigError(
                    f"layer {self._buffers.layer_id} {role}: the model gives {list(states.shape)} {states.dtype}, the "
                    f"pools hold {list(wanted)} {buffer.dtype}: build the layout from this model's configuration"
                )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens and return all that the queries may see.

        Shapes: states [1, num_heads, num_new, head_dim]; results [1, num_heads, visible, head_dim], copies.
        """
        self.lazy_initialization(key_states, value_states)
        self._length = self._step.end
        return self._exchange(self._buffers.key, key_states), self._exchange(self._buffers.value, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of tokens `update` will return, and the position of the first."""
        first = first_visible_token(self._buffers.group.life_cycle, self._length)
        return self._length - first + query_length, first

    def get_seq_length(self) -> int:
        """Tokens stored so far, out of the window or not."""
        return self._length

    def get_max_length(self) -> int:
        """The window, or -1 for no limit."""
        return -1 if self._window is None else self._window

    def _exchange(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        self._step.new.write(buffer, states[0])
        return self._step.visible.read(buffer)[None]


class PooledCache(Cache):
    """What a model needs as its cache for one forward pass over `num_new` tokens of a sequence.

    Valid while: this forward pass; the sequence is not resized meanwhile.

    Raises:
        InvariantError: a token that the pass reads or writes has no page.
    """

    def __init__(
        self, layout: CacheLayout, buffers: Sequence[LayerBuffers], sequence: SequenceCache, num_new: int
    ) -> None:
        device = buffers[0].key.device
        steps = {group.id: _Step(layout, group, sequence, num_new, device) for group in layout.life_cycles}
        super().__init__(layers=[PooledLayer(entry, steps[entry.group.id]) for entry in buffers])
