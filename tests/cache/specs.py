"""Small model specs for tests."""

from dataclasses import replace

from kvferry.cache.ids import LayerId
from kvferry.cache.layout import CacheLayout, build_layout
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec, StateSpec


def spec(windows: list[int | None], *, heads: int = 2, head_dim: int = 8, dtype: str = "float32") -> ModelSpec:
    """One layer per window, key and value of equal shape."""
    buffers = (BufferSpec("key", heads, head_dim), BufferSpec("value", heads, head_dim))
    layers = tuple(LayerSpec(LayerId(index), window, buffers) for index, window in enumerate(windows))
    return ModelSpec("test", dtype, layers)


def layout(windows: list[int | None], *, tokens_per_block: int = 4) -> CacheLayout:
    return build_layout(spec(windows), tokens_per_block=tokens_per_block)


def attention(
    window: int | None = None, *, heads: int = 2, head_dim: int = 8, sink_tokens: int = 0, scale_dim: int = 0
) -> LayerSpec:
    """A layer with key and value of equal shape; `scale_dim` bytes of block scales per token and head for each."""
    kept = [BufferSpec("key", heads, head_dim), BufferSpec("value", heads, head_dim)]
    if scale_dim:
        kept += [
            BufferSpec(f"{role}_block_scale", heads, scale_dim, "uint8", own_base=True) for role in ("key", "value")
        ]
    return LayerSpec(LayerId(0), window, tuple(kept), sink_tokens=sink_tokens)


def recurrent(*shape: int) -> LayerSpec:
    """A layer that keeps one state per sequence."""
    return LayerSpec(LayerId(0), None, states=(StateSpec("ssm_state", shape),))


def model(*layers: LayerSpec, dtype: str = "float32") -> ModelSpec:
    """The layers under ids of their own, in order."""
    return ModelSpec("test", dtype, tuple(replace(layer, layer_id=LayerId(i)) for i, layer in enumerate(layers)))
