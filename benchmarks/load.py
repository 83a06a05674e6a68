"""The load that capacities are counted for."""

from dataclasses import dataclass

import numpy as np

from kvferry.cache.sizing import Steps


@dataclass(frozen=True)
class Load:
    """Requests in steady decode: each computes one token per step (headroom 1) in the block that ends at its length.

    Over the steps of a block a window passes through every alignment, so the block it straddles is part of the peak.
    """

    num_tokens: int
    tokens_per_block: int

    @property
    def steps(self) -> Steps:
        """One step per position of the last block."""
        history = np.arange(self.num_tokens - self.tokens_per_block, self.num_tokens, dtype=np.int64)
        return Steps(history, history + 1)
