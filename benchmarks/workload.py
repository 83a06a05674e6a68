"""What the cache benchmarks run on: two layer layouts, and prompts no two of which are alike."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvferry.cache.ids import LayerId
from kvferry.cache.layout import CacheLayout, build_layout
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec

Tokens = npt.NDArray[np.uint32]
Attention = Literal["full", "hybrid"]

NUM_LAYERS = 36
NUM_HEADS = 8
HEAD_DIM = 64
WINDOW = 128
VOCABULARY = 200_000


@dataclass(frozen=True)
class Shape:
    """A pool to measure on.

    Attributes:
        attention: "full" for every layer, or "hybrid": windows of 128 tokens and full attention in turns.
        num_blocks: pages the pool holds. A block of tokens takes one page of the full layers and, in "hybrid", another
            of the windowed ones; both have the same size and come from one pool, here and in vLLM.
        publish: blocks are published for reuse as they fill.
    """

    attention: Attention
    tokens_per_block: int
    num_blocks: int
    publish: bool = True

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each life cycle."""
        return (None,) if self.attention == "full" else (WINDOW, None)

    def blocks_of(self, num_tokens: int) -> int:
        """Pages a sequence takes while no token has left a window."""
        return -(-num_tokens // self.tokens_per_block) * len(self.windows)


def layout_of(shape: Shape) -> CacheLayout:
    """The V2 layout of a shape."""
    buffers = (BufferSpec("key", NUM_HEADS, HEAD_DIM), BufferSpec("value", NUM_HEADS, HEAD_DIM))
    windows = shape.windows
    layers = tuple(LayerSpec(LayerId(i), windows[i % len(windows)], buffers) for i in range(NUM_LAYERS))
    spec = ModelSpec(f"{shape.attention} attention", "bfloat16", layers)
    return build_layout(spec, tokens_per_block=shape.tokens_per_block)


class Prompts:
    """A reproducible stream of random prompts."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def take(self, num_tokens: int) -> Tokens:
        """The next prompt. Shapes: uint32 [num_tokens]."""
        return self._random.integers(0, VOCABULARY, num_tokens, dtype=np.uint32)

    def take_some(self, count: int, shortest: int, longest: int) -> list[Tokens]:
        """The next `count` prompts, of random lengths from `shortest` to `longest`."""
        lengths = self._random.integers(shortest, longest, count, endpoint=True)
        return [self.take(int(length)) for length in lengths]
