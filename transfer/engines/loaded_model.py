"""A transformers causal language model that is ready to run, and the digest that says which one it is."""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvferry.cache.errors import ConfigError
from kvferry.cache.spec import ModelSpec
from kvferry.transfer.engines.base import Tokenizer

_SAYS_NOTHING_OF_THE_COMPUTATION = frozenset(
    {"transformers_version", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
)


_SAMPLES_PER_TENSOR = 1024


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer and its KV spec.

    Two processes get the same bits from it when they load the same file and use the same number of threads: matrix
    products round differently where the weights are aligned differently in memory, and mapped files keep the file's
    alignment.
    """

    name: str
    network: PreTrainedModel
    tokenizer: Tokenizer
    spec: ModelSpec
    digest: str

    @property
    def vocab_size(self) -> int:
        return int(self.network.config.get_text_config(decoder=True).vocab_size)

    @property
    def max_seq_len_tokens(self) -> int:
        return int(self.network.config.get_text_config(decoder=True).max_position_embeddings)

    def next_logits(self, token_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Run the model over new tokens of one sequence; the cache knows where they stand, and keeps them.

        Shapes: token_ids [n], int64; result [vocab_size], float32: the logits after the last token.
        """
        with torch.inference_mode():
            ids = token_ids.to(self.network.device)[None]
            placed = self._positions(cache.get_seq_length(), ids)
            output = self.network(
                input_ids=ids, use_cache=True, **{self._cache_argument: cache}, **placed, **self._last_only
            )
            logits: torch.Tensor = output.logits[0, -1]
            return logits.to(torch.float32)

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.network.forward).parameters

    def _positions(self, start: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Given, since some models else count from zero in every pass (Bamba in transformers 5.24)."""
        if "position_ids" not in self._parameters:
            return {}
        return {"position_ids": start + torch.arange(ids.shape[1], device=ids.device)[None]}

    @property
    def _cache_argument(self) -> str:
        """transformers is renaming this argument; some models still have the old name."""
        return "cache" if "cache" in self._parameters else "past_key_values"

    @property
    def _last_only(self) -> dict[str, int]:
        return {"logits_to_keep": 1} if "logits_to_keep" in self._parameters else {}


@contextmanager
def library_errors(doing: str) -> Iterator[None]:
    """Turn whatever transformers and the libraries below it raise into one line: ConfigError("cannot <doing>: ...").

    They raise nearly every built-in type, and bare Exception, about files that are not what they should be.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"cannot {doing}: {reason}") from error


def config_digest(config: Mapping[str, Any], *, weights: str = "") -> str:
    """SHA-256 over what a model's configuration says of its computation.

    Args:
        config: `config.to_dict()`; names, paths and versions in it are left out.
        weights: fingerprint of the weights: the same configuration with others computes other keys and values.
    """
    described = json.dumps([weights, _essential(config)], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()


def weights_fingerprint(network: PreTrainedModel) -> str:
    """SHA-256 over evenly spaced values of every tensor of a model: quick at any size.

    Checkpoints of one training, fine-tuned copies and other quantisations differ nearly everywhere; two models that
    differ only between the sampled values of every tensor are not told apart.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        values = tensor.detach().reshape(-1)
        step = max(1, values.numel() // _SAMPLES_PER_TENSOR)
        sampled = values[::step].to("cpu").contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(sampled.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _essential(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {str(key): _essential(entry) for key, entry in value.items()}
        private = {key for key in kept if key.startswith("_")}  # names, paths, what the library derived
        return {key: kept[key] for key in kept.keys() - private - _SAYS_NOTHING_OF_THE_COMPUTATION}
    return [_essential(entry) for entry in value] if isinstance(value, (list, tuple)) else value
