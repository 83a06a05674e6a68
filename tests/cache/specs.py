"""Small model specs for tests."""

from kvferry.cache.ids import LayerId
from kvferry.cache.layout import CacheLayout, build_layout
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec


def spec(windows: list[int | None], *, heads: int = 2, head_dim: int = 8, dtype: str = "float32") -> ModelSpec:
    """One layer per window, key and value of equal shape."""
    buffers = (BufferSpec("key", heads, head_dim), BufferSpec("value", heads, head_dim))
    layers = tuple(LayerSpec(LayerId(index), window, buffers) for index, window in enumerate(windows))
    return ModelSpec("test", dtype, layers)


def layout(windows: list[int | None], *, tokens_per_block: int = 4) -> CacheLayout:
    return build_layout(spec(windows), tokens_per_block=tokens_per_block)
