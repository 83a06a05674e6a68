"""The operations both cache managers are measured by."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from benchmarks.workload import Shape, Tokens


class Pool(ABC):
    """One open pool of one cache manager.

    A prompt is first brought into the manager's native form, which is never timed: an array for kvferry, a list
    for vLLM.
    """

    @abstractmethod
    def prompt(self, token_ids: Tokens) -> Any:
        """The native form of a prompt."""

    @abstractmethod
    def serve(self, prompt: Any) -> None:
        """Look for a cached prefix, take room for the whole prompt, publish its blocks, give the room back."""

    @abstractmethod
    def match(self, prompt: Any) -> int:
        """Hash a prompt, look up its cached prefix, and let go of it. Returns the tokens found."""

    @abstractmethod
    def hashed(self, prompt: Any) -> Any:
        """The prompt with its block hashes computed, for `match_hashed`."""

    @abstractmethod
    def match_hashed(self, hashed: Any) -> int:
        """As `match`, with the hashes at hand."""

    @abstractmethod
    def adopt_hashed(self, hashed: Any) -> int:
        """As `match_hashed`, and use what was found: take room for one more token before letting go."""

    @abstractmethod
    def start(self, prompts: Iterable[Tokens]) -> None:
        """Open one running sequence per prompt, the prompt computed and, in a pool that publishes, published."""

    @abstractmethod
    def step(self) -> float:
        """Room for one more token in every running sequence. Returns the seconds it took.

        In a pool that publishes, blocks that filled up are hashed and published too.
        """

    @abstractmethod
    def num_cached(self) -> int:
        """Pages that can be found and are held by nobody."""


class Side(ABC):
    """One cache manager."""

    name: str

    @abstractmethod
    def open(self, shape: Shape) -> Pool:
        """A fresh pool with nothing cached."""
