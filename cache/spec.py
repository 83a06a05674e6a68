"""What a model keeps in its KV cache: layers, windows, heads, bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from kvferry.cache.errors import ConfigError
from kvferry.cache.ids import LayerId

ITEM_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

MlaStorage = Literal["joint", "split"]
"""How multi-head latent attention is cached: latent and rotary part in one vector (serving engines), or as two buffers
(transformers 5.24)."""


@dataclass(frozen=True)
class BufferSpec:
    """One tensor a layer caches for every token. A buffer without heads or values takes no bytes and is left out.

    Shapes: [num_heads, head_dim] per token.

    Attributes:
        dtype: the model's when None.
        own_base: kernels address it from a base address of its own, as block scales: it lies in a second pool.
    """

    role: str
    num_heads: int
    head_dim: int
    dtype: str | None = None
    own_base: bool = False


@dataclass(frozen=True)
class StateSpec:
    """One tensor a recurrent layer keeps for a whole sequence. `dtype`: the model's when None."""

    role: str
    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps: buffers (attention), states (recurrent), or both.

    Attributes:
        window: tokens a query looks back on, itself included; None is full attention.
        sink_tokens: leading tokens that stay visible although they left the window.
    """

    layer_id: LayerId
    window: int | None
    buffers: tuple[BufferSpec, ...] = ()
    states: tuple[StateSpec, ...] = ()
    sink_tokens: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """Everything about a model that decides how its KV cache looks."""

    name: str
    dtype: str
    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        self.item_bytes_of(self.dtype)
        if not self.layers:
            raise ConfigError(f"model {self.name} has no layer with a KV cache")
        ids = [layer.layer_id for layer in self.layers]
        if len(set(ids)) != len(ids):
            raise ConfigError(f"model {self.name} repeats a layer id: {ids}")
        for layer in self.layers:
            _check_layer(layer)
            for dtype in (*(b.dtype for b in layer.buffers), *(s.dtype for s in layer.states)):
                self.item_bytes_of(dtype)

    def widened(self, match_backoff_tokens: int, max_seq_len_tokens: int) -> "ModelSpec":
        """The model with longer windows: a match that falls short by the backoff still has the pages it needs.

        A window that then holds the longest sequence is full attention. Pools of a manager with a match backoff are
        laid out for the widened model.

        Source: pools specification 1.2 and 5.3.
        """
        return replace(
            self, layers=tuple(_widened(layer, match_backoff_tokens, max_seq_len_tokens) for layer in self.layers)
        )

    def item_bytes_of(self, dtype: str | None) -> int:
        """Bytes of one value of a dtype, the model's own when None. Raises ConfigError for an unknown name."""
        name = self.dtype if dtype is None else dtype
        if name not in ITEM_BYTES:
            raise ConfigError(f"KV dtype {name!r} is not known: use one of {', '.join(ITEM_BYTES)}")
        return ITEM_BYTES[name]


def _widened(layer: LayerSpec, by_tokens: int, max_seq_len_tokens: int) -> LayerSpec:
    if layer.window is None:
        return layer
    window = layer.window + by_tokens
    full = window >= max_seq_len_tokens
    return replace(layer, window=None if full else window, sink_tokens=0 if full else layer.sink_tokens)


def _check_layer(layer: LayerSpec) -> None:
    roles = [*(buffer.role for buffer in layer.buffers), *(state.role for state in layer.states)]
    if not roles or len(set(roles)) != len(roles):
        raise ConfigError(f"layer {layer.layer_id} needs at least one buffer or state and distinct roles, not {roles}")
    if layer.sink_tokens < 0 or (layer.sink_tokens and layer.window is None):
        raise ConfigError(f"layer {layer.layer_id} has {layer.sink_tokens} sink tokens: sinks need a window")
    for buffer in layer.buffers:
        if buffer.num_heads < 0 or buffer.head_dim < 0:
            raise ConfigError(
                f"layer {layer.layer_id} buffer {buffer.role!r} has {buffer.num_heads} heads of {buffer.head_dim}: "
                "neither can be negative"
            )
    for state in layer.states:
        if not state.shape or min(state.shape) < 1:
            raise ConfigError(
                f"layer {layer.layer_id} state {state.role!r} has shape {list(state.shape)}: needs sizes >= 1"
            )


def from_transformers_config(
    config: Mapping[str, Any], *, name: str = "", dtype: str | None = None, mla: MlaStorage = "split"
) -> ModelSpec:
    """Read a ModelSpec from `config.to_dict()` of a transformers causal language model.

    Layers that cache nothing are left out; the others keep the index they have in the model.

    Args:
        config: the dictionary; a multi-modal model's `text_config` is used when present.
        name: shown in messages; the architecture when empty.
        dtype: dtype of the cached values; the config's own when None. Recurrent states are float32 in any case.
        mla: how latent attention is stored.

    Raises:
        ConfigError: a field is missing, or a layer is of a type that pools do not hold (chunked attention, recurrent
            layers of other models than the message lists).
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    architectures = config.get("architectures") or [config.get("model_type", "model")]
    kinds = _layer_kinds(text)
    own = text.get("num_hidden_layers", len(kinds)) - (text.get("num_kv_shared_layers") or 0)
    layers = (_layer(text, index, kind, mla) for index, kind in enumerate(kinds[:own]) if kind not in _CACHES_NOTHING)
    return ModelSpec(name or str(architectures[0]), dtype or _dtype(config, text), tuple(layers))


_CACHES_NOTHING = frozenset({"mlp", "moe"})


def _required(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ConfigError(f"model config has no integer {key!r} (found {value!r}): not a causal language model config?")
    return value


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    value = text.get("dtype") or config.get("dtype") or "float32"
    return str(value).removeprefix("torch.")


def _layer_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """The type of every layer, in layer order. Some models derive it from fields of their own."""
    listed = config.get("layer_types") or config.get("layers_block_type")
    if listed:
        return list(listed)
    num_layers = _required(config, "num_hidden_layers")
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * num_layers
    if config.get("model_type") == "bamba":
        attention = frozenset(config.get("attn_layer_indices") or ())
        return ["full_attention" if index in attention else "linear_attention" for index in range(num_layers)]
    sliding = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
    return ["sliding_attention" if sliding else "full_attention"] * num_layers


def _layer(config: Mapping[str, Any], index: int, kind: str, mla: MlaStorage) -> LayerSpec:
    window, model_type = config.get("sliding_window"), str(config.get("model_type"))
    attends = kind in ("full_attention", "hybrid") or (kind == "sliding_attention" and bool(window))
    recurs = kind in ("linear_attention", "hybrid")
    if not (attends or recurs) or (recurs and model_type not in _STATES):
        raise ConfigError(
            f"layer {index} of model type {model_type!r} has type {kind!r} and sliding_window {window!r}: pools hold "
            "full_attention, sliding_attention (with a window), and the linear_attention or hybrid layers of "
            f"{', '.join(_STATES)}"
        )
    return LayerSpec(
        LayerId(index),
        int(window) if window and kind == "sliding_attention" else None,
        _buffers(config, mla) if attends else (),
        _STATES[model_type](config) if recurs else (),
    )


def _buffers(config: Mapping[str, Any], mla: MlaStorage) -> tuple[BufferSpec, ...]:
    return _mla_buffers(config, mla) if config.get("kv_lora_rank") else _head_buffers(config)


class _MambaKeys(NamedTuple):
    """What a model calls the sizes of its Mamba-2 layers."""

    num_heads: str
    head_dim: str
    num_groups: str
    state_size: str
    conv_kernel: str


_NEMOTRON_KEYS = _MambaKeys("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
_BAMBA_KEYS = _MambaKeys("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")


def _mamba_states(keys: _MambaKeys, config: Mapping[str, Any]) -> tuple[StateSpec, ...]:
    """The last inputs of the convolution over x, B and C, and the state [head, value, state] in float32."""
    heads, head_dim, groups, state_size, kernel = (_required(config, key) for key in keys)
    channels = heads * head_dim + 2 * groups * state_size
    ssm_state = StateSpec("ssm_state", (heads, head_dim, state_size), _STATE_DTYPE)
    return (StateSpec("conv_state", (channels, kernel)), ssm_state)


def _delta_net_states(config: Mapping[str, Any]) -> tuple[StateSpec, ...]:
    """The last inputs of the convolution over query, key, value, and the state [head, key, value] in float32."""
    key_dim, value_dim = _required(config, "linear_key_head_dim"), _required(config, "linear_value_head_dim")
    key_heads, value_heads = _required(config, "linear_num_key_heads"), _required(config, "linear_num_value_heads")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    state = StateSpec("recurrent_state", (value_heads, key_dim, value_dim), _STATE_DTYPE)
    return (StateSpec("conv_state", (channels, _required(config, "linear_conv_kernel_dim"))), state)


_STATE_DTYPE = "float32"
"""transformers computes and keeps recurrent states in float32 whatever the model's dtype is."""

_STATES: Mapping[str, Callable[[Mapping[str, Any]], tuple[StateSpec, ...]]] = {
    "qwen3_next": _delta_net_states,
    "nemotron_h": partial(_mamba_states, _NEMOTRON_KEYS),
    "falcon_h1": partial(_mamba_states, _BAMBA_KEYS),
    "bamba": partial(_mamba_states, _BAMBA_KEYS),
}


def _head_buffers(config: Mapping[str, Any]) -> tuple[BufferSpec, ...]:
    num_heads = _required(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or _required(config, "hidden_size") // num_heads
    return (BufferSpec("key", num_kv_heads, head_dim), BufferSpec("value", num_kv_heads, head_dim))


def _mla_buffers(config: Mapping[str, Any], storage: MlaStorage) -> tuple[BufferSpec, ...]:
    latent, rope = _required(config, "kv_lora_rank"), _required(config, "qk_rope_head_dim")
    if storage == "joint":
        return (BufferSpec("key", 1, latent + rope),)
    return (BufferSpec("key", 1, latent), BufferSpec("value", 1, rope))
