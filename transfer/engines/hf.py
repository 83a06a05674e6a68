"""Any transformers causal language model, with its keys and values in the pools."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.errors import ConfigError, LocalProtocolError
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.hf_cache import CacheViews, PooledCache
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.paged import check_layout, new_tokens


class HfEngine(Engine):
    """Runs a loaded model one sequence at a time. Logits equal, to the bit, those of the model's own cache."""

    name: ClassVar[str] = "hf"

    def __init__(self, model: LoadedModel) -> None:
        self.spec = model.spec
        self.model_digest = model.digest
        self.tokenizer = model.tokenizer
        self.vocab_size = model.vocab_size
        self.max_seq_len_tokens = model.max_seq_len_tokens
        self._model = model
        self._views: CacheViews | None = None

    def bind(self, manager: CacheManager) -> None:
        """See `Engine.bind`.

        Raises:
            ConfigError: the pools were laid out for another model, or lie on another device.
        """
        if self._views is not None:
            raise LocalProtocolError("the engine is already bound to a manager")
        check_layout(self.spec, manager.layout)
        if manager.storage.device != self._model.network.device:
            raise ConfigError(
                f"the pools are on {manager.storage.device}, the model on {self._model.network.device}: "
                "use one device for both"
            )
        self._views = CacheViews(manager)

    def forward(self, sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """See `Engine.forward`.

        Raises:
            ConfigError: a token id the model does not have, a position beyond its longest sequence, or keys, values or
                states of another shape than the pools hold.
            InvariantError: a token that the pass reads or writes has no page, or a recurrent layer has no state.
        """
        if self._views is None:
            raise LocalProtocolError("forward before bind")
        new = new_tokens(sequence, token_ids)
        self._check_tokens(sequence, new)
        cache = PooledCache(self._views, sequence, len(new))
        logits = self._model.next_logits(torch.tensor(new, dtype=torch.int64), cache)
        cache.store_states()
        return logits

    def _check_tokens(self, sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> None:
        end = sequence.history + len(token_ids)
        if end > self.max_seq_len_tokens:
            raise ConfigError(
                f"request {sequence.request_id} reaches {end} tokens, the model {self._model.name} stops at "
                f"{self.max_seq_len_tokens}: shorten the prompt or max_new_tokens"
            )
        outside = token_ids[(token_ids < 0) | (token_ids >= self.vocab_size)]
        if len(outside):
            raise ConfigError(
                f"request {sequence.request_id} has token ids {outside[:8].tolist()}: the model {self._model.name} "
                f"knows 0 to {self.vocab_size - 1}"
            )
