"""A cache manager that keeps a clock instead of books."""

from collections.abc import Iterable
from typing import Any

from benchmarks.side import Pool, Side
from benchmarks.workload import Shape, Tokens


class FakePool(Pool):
    """Finds `found` tokens of every prompt and remembers how often it was asked for what."""

    def __init__(self, found: int) -> None:
        self._found = found
        self.served = 0
        self.running = 0

    def prompt(self, token_ids: Tokens) -> Any:
        return token_ids

    def serve(self, prompt: Any) -> None:
        self.served += 1

    def match(self, prompt: Any) -> int:
        return self._found

    def hashed(self, prompt: Any) -> Any:
        return prompt

    def match_hashed(self, hashed: Any) -> int:
        return self._found

    def adopt_hashed(self, hashed: Any) -> int:
        return self._found

    def start(self, prompts: Iterable[Tokens]) -> None:
        self.running = len(list(prompts))

    def step(self) -> float:
        return self.running / 1000

    def num_cached(self) -> int:
        return 100


class FakeSide(Side):
    """Opens fake pools."""

    def __init__(self, name: str, *, found: int = 0) -> None:
        self.name = name
        self.pools: list[FakePool] = []
        self.shapes: list[Shape] = []
        self._found = found

    def open(self, shape: Shape) -> FakePool:
        self.shapes.append(shape)
        self.pools.append(FakePool(self._found))
        return self.pools[-1]
