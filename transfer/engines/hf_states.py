"""The states of recurrent layers during one forward pass: copied out of the pools before it, and back after it.

transformers changes states in place, some through the cache and some behind its back. It works on copies, so a pass
that fails leaves the pools' states as they were, and every state has the alignment that a fresh tensor has: matrix
products round differently at another one.
"""

from dataclasses import dataclass

import torch
from transformers.cache_utils import LinearAttentionLayer

from kvferry.cache.errors import ConfigError
from kvferry.cache.ids import LayerId
from kvferry.cache.protocol import CacheManager

CONV_STATE = "conv_state"


@dataclass(frozen=True)
class LayerStates:
    """One layer's views of the pool.

    Shapes: conv [num_slots, channels, kernel], recurrent [num_slots, num_heads, rows, columns].
    """

    layer_id: LayerId
    conv: torch.Tensor
    recurrent: torch.Tensor


def layer_states(manager: CacheManager) -> dict[LayerId, LayerStates]:
    """The states of every recurrent layer, by layer. Raises ConfigError unless each has a convolution's and another."""
    group = manager.layout.recurrent
    roles: dict[LayerId, list[str]] = {}
    for view in group.states if group else ():
        roles.setdefault(view.layer_id, []).append(view.role)
    found = {}
    for layer, held in roles.items():
        others = [role for role in held if role != CONV_STATE]
        if len(others) != 1:
            raise ConfigError(f"layer {layer} has states {others} beside {CONV_STATE!r}: one is needed")
        found[layer] = LayerStates(layer, manager.state(layer, CONV_STATE), manager.state(layer, others[0]))
    return found


class PooledStateLayer(LinearAttentionLayer):
    """One recurrent layer during one forward pass over one sequence.

    transformers 5.24 goes on from a previous state with one new token or with several, so prompts may be computed in
    chunks. NemotronH alone treats the two differently: it applies `time_step_min` to several tokens and not to one, so
    its results depend on where chunks end by more than rounding, if time steps are that small.

    Without a previous state nothing is read: what the slot held before is never seen.
    """

    def __init__(self, states: LayerStates, slot: int, *, resumed: bool) -> None:
        super().__init__()
        self._pool = states
        self._slot = slot
        if resumed:
            self._resume()

    def store(self) -> None:
        """Write the states after this pass to the pools.

        Raises:
            ConfigError: the model's states are not what the pools hold, or it made none.
        """
        for name, states, pool in (
            ("convolution", self.conv_states[0], self._pool.conv),
            ("recurrent", self.recurrent_states[0], self._pool.recurrent),
        ):
            wanted = (1, *pool.shape[1:])
            if states is None or tuple(states.shape) != wanted or states.dtype != pool.dtype:
                given = "none" if states is None else f"{list(states.shape)} {states.dtype}"
                raise ConfigError(
                    f"layer {self._pool.layer_id} {name} state: the model gives {given}, the pools hold {list(wanted)} "
                    f"{pool.dtype}: build the layout from this model's configuration"
                )
            pool[self._slot].copy_(states[0])

    def _resume(self) -> None:
        conv, recurrent = (pool[self._slot].clone()[None] for pool in (self._pool.conv, self._pool.recurrent))
        self.dtype, self.device = conv.dtype, conv.device
        self.conv_states[0], self.is_conv_states_initialized[0] = conv, True
        self.recurrent_states[0], self.is_recurrent_states_initialized[0] = recurrent, True
        self.conv_kernel_size[0] = conv.shape[-1]
        self.has_previous_state[0] = True
