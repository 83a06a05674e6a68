"""A transformers cache whose keys and values live in the pools: scatter on write, dense gather on read.

What a layer returns is, to the bit, what transformers' own dynamic cache would return for the same chunks: everything
under full attention, the last window - 1 tokens and the new ones under a window. Layers that cache nothing are dummies,
so that every layer stands at its own index.
"""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from kvferry.cache.errors import ConfigError
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import CacheLayout, LifeCycleLayout
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.engines.hf_states import LayerStates, PooledStateLayer, layer_states
from kvferry.transfer.engines.paged import TokenSpan, first_visible_token


@dataclass(frozen=True)
class LayerBuffers:
    """One attention layer's views of the pool. Shapes: [num_pages, num_heads, tokens_per_block, head_dim] each."""

    layer_id: LayerId
    group: LifeCycleLayout
    key: torch.Tensor
    value: torch.Tensor


def layer_buffers(manager: CacheManager) -> dict[LayerId, LayerBuffers]:
    """The views of every attention layer, by layer. Raises ConfigError when one has no key or no value buffer."""
    layout = manager.layout
    layer_ids = {view.layer_id for group in layout.life_cycles for view in group.buffers}
    return {
        layer: LayerBuffers(
            layer,
            layout.buffer(layer, "key")[0],
            manager.paged_buffer(layer, "key"),
            manager.paged_buffer(layer, "value"),
        )
        for layer in layer_ids
    }


class CacheViews:
    """The pools as the layers of a model see them. Made once per manager."""

    def __init__(self, manager: CacheManager) -> None:
        self.layout = manager.layout
        self.device = manager.storage.device
        self.buffers = layer_buffers(manager)
        self.states = layer_states(manager)
        self.num_layers = 1 + max((*self.buffers, *self.states))


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

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing to do: the pools exist."""

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Raise ConfigError, with both shapes, unless the model's keys and values are what the pools hold."""
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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens and return all that the queries may see.

        Shapes: states [1, num_heads, num_new, head_dim]; results [1, num_heads, visible, head_dim], copies.
        """
        self._check(key_states, value_states)
        self._length, self.is_initialized = self._step.end, True
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
        self._step.new.write(buffer, self._buffers.layer_id, states[0])
        return self._step.visible.read(buffer, self._buffers.layer_id)[None]


class PooledHybridLayer(PooledStateLayer, PooledLayer):
    """A layer with attention and a recurrent state side by side."""

    is_compileable = False
    is_croppable = False

    def __init__(self, buffers: LayerBuffers, step: _Step, states: LayerStates, slot: int) -> None:
        PooledLayer.__init__(self, buffers, step)
        PooledStateLayer.__init__(self, states, slot, resumed=step.history > 0)


class PooledCache(Cache):
    """What a model needs as its cache for one forward pass over `num_new` tokens of a sequence.

    Valid while: this forward pass; the sequence is not resized meanwhile.

    Raises:
        InvariantError: a token that the pass reads or writes has no page, or a recurrent layer has no state.
    """

    def __init__(self, views: CacheViews, sequence: SequenceCache, num_new: int) -> None:
        attention = [group for group in views.layout.life_cycles if not group.life_cycle.recurrent]
        self._views = views
        self._steps = {group.id: _Step(views.layout, group, sequence, num_new, views.device) for group in attention}
        self._resumed = sequence.history > 0
        self._slot = sequence.state_slot if views.states else 0
        super().__init__(layers=[self._layer(LayerId(index)) for index in range(views.num_layers)])

    def store_states(self) -> None:
        """Write the recurrent states after this pass to the pools. Keys and values are there already.

        Raises:
            ConfigError: the model's states are not what the pools hold.
        """
        for layer in self.layers:
            if isinstance(layer, PooledStateLayer):
                layer.store()

    def _layer(self, index: LayerId) -> CacheLayerMixin | PooledStateLayer | DummyLayer:
        buffers, states = self._views.buffers.get(index), self._views.states.get(index)
        if buffers is not None and states is not None:
            return PooledHybridLayer(buffers, self._steps[buffers.group.id], states, self._slot)
        if buffers is not None:
            return PooledLayer(buffers, self._steps[buffers.group.id])
        if states is not None:
            return PooledStateLayer(states, self._slot, resumed=self._resumed)
        return DummyLayer()
