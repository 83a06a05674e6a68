"""Life cycles: when the pages of a group of layers go stale."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.cache.errors import ConfigError

Counts = npt.NDArray[np.int64]
Number = TypeVar("Number", int, Counts)


class BlockRange(NamedTuple):
    """Half-open range [start, end) of block ordinals."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def clipped(self, num_blocks: int) -> "BlockRange":
        """The part of the range below `num_blocks`."""
        return BlockRange(min(self.start, num_blocks), min(self.end, num_blocks))


def ceil_div(numerator: int, denominator: int) -> int:
    """Exact integer ceiling of a quotient."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class LifeCycle:
    """How long the pages of some layers stay needed.

    Attributes:
        window: tokens a query can look back on, itself included; None for full attention.
        sink_blocks: leading blocks that never go stale; only a windowed life cycle has them.
        recurrent: the layers keep one state per sequence instead of something per token; its page is that state.
    """

    window: int | None = None
    sink_blocks: int = 0
    recurrent: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window} tokens: a window covers at least the query itself (1)")
        if self.sink_blocks < 0 or (self.sink_blocks and self.window is None):
            raise ConfigError(f"sink_blocks is {self.sink_blocks}: sinks need a window and cannot be negative")
        if self.recurrent and self.window is not None:
            raise ConfigError(f"a recurrent life cycle has no window, {self.window} is given")

    @property
    def full(self) -> bool:
        """Every block stays needed for good."""
        return self.window is None and not self.recurrent

    def stale_bounds(self, history: Counts, tokens_per_block: int) -> tuple[Counts, Counts]:
        """Start and end of the blocks that no query at or after position `history` reads.

        The query at `history` sees tokens [history + 1 - window, history]: the "+ 1" is the query itself. A recurrent
        state replaces all blocks before the one that holds token history - 1, where it is kept.

        Shapes: all alike.
        Source: pools specification 3.6.
        """
        return self._stale(history, tokens_per_block, np.minimum, np.maximum)

    def stale_range(self, history: int, tokens_per_block: int) -> BlockRange:
        """`stale_bounds` of one sequence."""
        return BlockRange(*self._stale(history, tokens_per_block, min, max))

    def _stale(
        self,
        history: Number,
        tokens_per_block: int,
        least: Callable[[Number, int], Number],
        greatest: Callable[[Number, Number | int], Number],
    ) -> tuple[Number, Number]:
        """One formula for numbers and arrays, which differ in how the least and the greatest of two are found."""
        if self.recurrent:
            return 0 * history, greatest(-(-history // tokens_per_block) - 1, 0)
        if self.window is None:
            return 0 * history, 0 * history
        first = least(-(-history // tokens_per_block), self.sink_blocks)
        return first, greatest(first, (history + 1 - self.window) // tokens_per_block)

    def live_counts(self, history: Counts, capacity: Counts, tokens_per_block: int) -> Counts:
        """Pages that sequences with these cursors hold. Shapes: all alike."""
        blocks = -(-capacity // tokens_per_block)
        if self.recurrent:
            return np.minimum(blocks, 1)
        start, end = self.stale_bounds(history, tokens_per_block)
        live: Counts = blocks - (np.minimum(end, blocks) - np.minimum(start, blocks))
        return live

    def live_blocks(self, history: int, capacity: int, tokens_per_block: int) -> int:
        """`live_counts` of one sequence."""
        return int(self.live_counts(np.array([history], np.int64), np.array([capacity], np.int64), tokens_per_block)[0])

    def max_live_blocks(self, headroom: int, tokens_per_block: int) -> int | None:
        """The most pages a sequence of any length ever holds when capacity - history <= `headroom`; None: no limit.

        A window may straddle one block more than it fills, hence the "+ 1".
        Source: pools specification 3.7, checked there by brute force.
        """
        if self.recurrent:
            return 1
        if self.window is None:
            return None
        return ceil_div(self.window + headroom - 2, tokens_per_block) + 1 + self.sink_blocks

    def scratch_range(self, history: int, capacity: int, tokens_per_block: int, max_rewind: int = 0) -> BlockRange:
        """New blocks that will be out of the window once all of `capacity` that cannot be rewound is history.

        They need no page of their own while a prompt is computed layer by layer. Older blocks hold data already.
        Source: pools specification 3.8.
        """
        if self.window is None:
            return BlockRange(0, 0)
        stale = self.stale_range(max(0, capacity - max_rewind), tokens_per_block)
        start = max(stale.start, ceil_div(history, tokens_per_block))
        return BlockRange(start, max(start, min(stale.end, ceil_div(capacity, tokens_per_block))))

    def __str__(self) -> str:
        if self.recurrent:
            return "recurrent"
        name = "full" if self.window is None else f"window {self.window}"
        return name + (f" + {self.sink_blocks} sink blocks" if self.sink_blocks else "")
