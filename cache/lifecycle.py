"""Life cycles: when the pages of a group of layers go stale."""

from dataclasses import dataclass
from typing import NamedTuple

from kvferry.cache.errors import ConfigError


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
    """

    window: int | None = None
    sink_blocks: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window} tokens: a window covers at least the query itself (1)")
        if self.sink_blocks < 0 or (self.sink_blocks and self.window is None):
            raise ConfigError(f"sink_blocks is {self.sink_blocks}: sinks need a window and cannot be negative")

    def stale_range(self, history: int, tokens_per_block: int) -> BlockRange:
        """Blocks that no query at or after position `history` reads.

        The query at `history` sees tokens [history + 1 - window, history]: the "+ 1" is the query itself.
        Source: pools specification 3.6.
        """
        if self.window is None:
            return BlockRange(0, 0)
        first = min(ceil_div(history, tokens_per_block), self.sink_blocks)
        return BlockRange(first, max(first, (history + 1 - self.window) // tokens_per_block))

    def live_blocks(self, history: int, capacity: int, tokens_per_block: int) -> int:
        """Pages a sequence with these cursors holds."""
        num_blocks = ceil_div(capacity, tokens_per_block)
        return num_blocks - len(self.stale_range(history, tokens_per_block).clipped(num_blocks))

    def max_live_blocks(self, headroom: int, tokens_per_block: int) -> int | None:
        """The most pages a sequence of any length ever holds when capacity - history <= `headroom`; None: no limit.

        A window may straddle one block more than it fills, hence the "+ 1".
        Source: pools specification 3.7, checked there by brute force.
        """
        if self.window is None:
            return None
        return ceil_div(self.window + headroom - 2, tokens_per_block) + 1 + self.sink_blocks

    def __str__(self) -> str:
        name = "full" if self.window is None else f"window {self.window}"
        return name + (f" + {self.sink_blocks} sink blocks" if self.sink_blocks else "")
