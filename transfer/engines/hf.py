"""Any transformers causal language model, with its keys and values in the pools."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.errors import ConfigError, LocalProtocolError
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.hf_cache import LayerBuffers, PooledCache, layer_buffers
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.paged import check_layout


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
        self._manager: KVCacheManager | None = None
        self._buffers: tuple[LayerBuffers, ...] = ()

    def bind(self, manager: KVCacheManager) -> None:
        """See `Engine.bind`.

        Raises:
            ConfigError: the pools were laid out for another model, or lie on another device.
        """
        if self._manager is not None:
            raise LocalProtocolError("the engine is already bound to a manager")
        check_layout(self.spec, manager.layout)
        if manager.storage.device != self._model.network.device:
            raise ConfigError(
                f"the pools are on {manager.storage.device}, the model on {self._model.network.device}: "
                "use one device for both"
            )
        self._manager, self._buffers = manager, layer_buffers(manager)

    def forward(self, sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """See `Engine.forward`.

        Raises:
            ConfigError: a token id the model does not have, a position beyond its longest sequence, or keys and values
                of another shape than the pools hold.
            InvariantError: a token that the pass reads or writes has no page.
        """
        if self._manager is None:
            raise LocalProtocolError("forward before bind")
        self._check_tokens(sequence, token_ids)
        cache = PooledCache(self._manager.layout, self._buffers, sequence, len(token_ids))
        return self._model.next_logits(torch.tensor(token_ids, dtype=torch.int64), cache)

    def _check_tokens(self, sequence: SequenceCache, token_ids: npt.NDArray[np.int64]) -> None:
        if len(token_ids) == 0:
            raise LocalProtocolError(f"forward of request {sequence.request_id} without tokens")
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
