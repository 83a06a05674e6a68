"""What a model keeps in its KV cache: layers, windows, heads, bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
    """One tensor a layer caches for every token.

    Shapes: [num_heads, head_dim] per token.
    """

    role: str
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer. `window` counts tokens, the query included; None is full attention."""

    layer_id: LayerId
    window: int | None
    buffers: tuple[BufferSpec, ...]


@dataclass(frozen=True)
class ModelSpec:
    """Everything about a model that decides how its KV cache looks."""

    name: str
    dtype: str
    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"KV dtype {self.dtype!r} is not known: use one of {', '.join(ITEM_BYTES)}")
        if not self.layers:
            raise ConfigError(f"model {self.name} has no layer with a KV cache")
        ids = [layer.layer_id for layer in self.layers]
        if len(set(ids)) != len(ids):
            raise ConfigError(f"model {self.name} repeats a layer id: {ids}")
        for layer in self.layers:
            _check_layer(layer)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def _check_layer(layer: LayerSpec) -> None:
    roles = [buffer.role for buffer in layer.buffers]
    if not roles or len(set(roles)) != len(roles):
        raise ConfigError(f"layer {layer.layer_id} needs at least one buffer and distinct roles, not {roles}")
    for buffer in layer.buffers:
        if buffer.num_heads < 1 or buffer.head_dim < 1:
            raise ConfigError(
                f"layer {layer.layer_id} buffer {buffer.role!r} has {buffer.num_heads} heads of {buffer.head_dim}: "
                "both must be at least 1"
            )


def from_transformers_config(
    config: Mapping[str, Any], *, name: str = "", dtype: str | None = None, mla: MlaStorage = "split"
) -> ModelSpec:
    """Read a ModelSpec from `config.to_dict()` of a transformers causal language model.

    Args:
        config: the dictionary; a multi-modal model's `text_config` is used when present.
        name: shown in messages; the architecture when empty.
        dtype: dtype of the cached values; the config's own when None.
        mla: how latent attention is stored.

    Raises:
        ConfigError: a field is missing, or a layer type has no KV pages (recurrent or chunked attention).
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    windows = _windows(text)
    buffers = _mla_buffers(text, mla) if text.get("kv_lora_rank") else _head_buffers(text)
    architectures = config.get("architectures") or [config.get("model_type", "model")]
    layers = tuple(LayerSpec(LayerId(index), window, buffers) for index, window in enumerate(windows))
    return ModelSpec(name or str(architectures[0]), dtype or _dtype(config, text), layers)


def _required(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ConfigError(f"model config has no integer {key!r} (found {value!r}): not a causal language model config?")
    return value


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    value = text.get("dtype") or config.get("dtype") or "float32"
    return str(value).removeprefix("torch.")


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """Window of each layer that has a cache of its own, in layer order."""
    num_layers = _required(config, "num_hidden_layers")
    window = config.get("sliding_window")
    sliding = window is not None and config.get("use_sliding_window") is not False
    types = config.get("layer_types") or ["sliding_attention" if sliding else "full_attention"] * num_layers
    shared = config.get("num_kv_shared_layers") or 0
    return [_window(index, kind, window) for index, kind in enumerate(types[: num_layers - shared])]


def _window(index: int, layer_type: str, window: int | None) -> int | None:
    if layer_type == "full_attention":
        return None
    if layer_type == "sliding_attention" and window:
        return int(window)
    raise ConfigError(
        f"layer {index} has type {layer_type!r} and sliding_window {window!r}: pools hold full_attention and "
        "sliding_attention (with a window); recurrent and chunked layers are not supported yet"
    )


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
