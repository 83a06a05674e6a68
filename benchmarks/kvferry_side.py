"""kvferry's V2 manager, on pools without bytes."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.side import Pool, Side
from benchmarks.stopwatch import clock_s
from benchmarks.workload import Shape, Tokens, layout_of
from kvferry.cache.admission import PoolOptions
from kvferry.cache.block_keys import ReuseScope, as_token_ids
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache

SCOPE = ReuseScope()


class KvferryPool(Pool):
    """One V2 manager.

    Args:
        from_lists: prompts come as lists of ints, as in vLLM, and are made arrays inside the measurement.
    """

    def __init__(self, shape: Shape, *, from_lists: bool = False) -> None:
        options = PoolOptions(commit_policy="all_reusable" if shape.publish else "off")
        self._shape = shape
        self._from_lists = from_lists
        self._manager = KVCacheManager(layout_of(shape), (shape.num_blocks,), "meta", options=options)
        self._count = 0
        self._running: list[SequenceCache] = []
        self._history = self._rows = np.zeros(0, np.int64)

    def prompt(self, token_ids: Tokens) -> Any:
        return token_ids.tolist() if self._from_lists else as_token_ids(token_ids)

    def serve(self, prompt: Any) -> None:
        token_ids = as_token_ids(prompt)
        # The last token is always computed: its output is the first new token.
        sequence = self._create(token_ids[:-1])
        sequence.resume()
        sequence.resize(capacity=len(token_ids))
        sequence.commit(token_ids[sequence.committed :])
        sequence.close()

    def match(self, prompt: Any) -> int:
        return self._matched(self._create(as_token_ids(prompt)[:-1]))

    def hashed(self, prompt: Any) -> Any:
        token_ids = as_token_ids(prompt)[:-1]
        return token_ids, self._manager.block_keys(token_ids, SCOPE)

    def match_hashed(self, hashed: Any) -> int:
        return self._matched(self._create(*hashed))

    def adopt_hashed(self, hashed: Any) -> int:
        sequence = self._create(*hashed)
        sequence.resume()
        sequence.resize(capacity=sequence.reused_tokens + 1)
        return self._matched(sequence)

    def start(self, prompts: Iterable[Tokens]) -> None:
        for prompt in prompts:
            sequence = self._create(prompt[:0])
            sequence.resume()
            sequence.resize(capacity=len(prompt))
            sequence.commit(prompt)
            self._running.append(sequence)
        self._history = np.array([sequence.capacity for sequence in self._running], np.int64)
        self._rows = np.array([sequence.row for sequence in self._running], np.int64)

    def step(self) -> float:
        start = clock_s()
        self._manager.resize_rows(self._rows, capacity=self._history + 1, history=self._history)
        self._history += 1
        if self._shape.publish:
            self._publish_filled()
        return clock_s() - start

    def num_cached(self) -> int:
        return sum(group.cached for group in self._manager.usage())

    def _publish_filled(self) -> None:
        """Commit where the step has filled a block; an engine has no reason to do it for every token."""
        for index in np.flatnonzero(self._history % self._shape.tokens_per_block == 0).tolist():
            sequence = self._running[index]
            sequence.commit(np.zeros(int(self._history[index]) - sequence.committed, np.uint32))

    def _create(self, token_ids: Tokens, keys: Sequence[bytes] | None = None) -> SequenceCache:
        self._count += 1
        return self._manager.create_sequence(f"request-{self._count}", token_ids=token_ids, scope=SCOPE, keys=keys)

    def _matched(self, sequence: SequenceCache) -> int:
        found = sequence.reused_tokens
        sequence.close()
        return found


class KvferrySide(Side):
    """kvferry, given arrays or lists."""

    def __init__(self, *, from_lists: bool = False) -> None:
        self.name = "kvferry, from lists" if from_lists else "kvferry"
        self._from_lists = from_lists

    def open(self, shape: Shape) -> KvferryPool:
        return KvferryPool(shape, from_lists=self._from_lists)
