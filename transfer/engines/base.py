"""The contract between kvferry and what computes KV."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.protocol import CacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import ModelSpec


class Tokenizer(Protocol):
    """Text to tokens and back."""

    eos_token_ids: frozenset[int]

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """Token ids of a prompt; `chat` wraps it as one user turn where the model has a chat template."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of generated tokens, special tokens left out."""


class Engine(ABC):
    """One model whose keys and values live in the pools.

    Concurrency: all methods are called from one thread, the engine's loop.
    """

    name: ClassVar[str]
    spec: ModelSpec
    model_digest: str
    tokenizer: Tokenizer
    vocab_size: int
    max_seq_len_tokens: int

    @abstractmethod
    def bind(self, manager: CacheManager) -> None:
        """Use the pools of this manager. Its layout was built from `spec`. Called once, before `forward`."""

    @abstractmethod
    def forward(self, sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """Run the model over the new tokens of one sequence and return the logits of the last one.

        The new tokens are those at positions [sequence.history, len(token_ids)); the caller has resized the sequence so
        that capacity covers them, and declares them as history afterwards. Their keys and values, and the recurrent
        states after them, are in the sequence's pages when this returns (on cuda: when the current stream reaches this
        point). Where a pass fails, states are as before it; where it succeeds, they are those after the last token, so
        it must not be repeated with the same history.

        Args:
            token_ids: all tokens of the sequence from its first, also those that were reused or received.

        Shapes: token_ids [n]; result [vocab_size], float32, on the engine's device.

        Raises:
            LocalProtocolError: no new token, or not bound.
        """
