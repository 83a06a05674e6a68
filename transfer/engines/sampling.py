"""Choosing a token from logits. The same (seed, position, logits) give the same token in every process."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.errors import ComputeError, ConfigError
from kvferry.transfer.inference import SamplingParams


class Sampled(NamedTuple):
    """A token and the natural logarithm of the probability the model gave it, at temperature 1."""

    token: int
    logprob: float


def check_sampling(params: SamplingParams) -> None:
    """Raise ConfigError when the parameters make no sense."""
    if params.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {params.max_new_tokens}: ask for at least 1")
    if not 0.0 <= params.temperature < float("inf"):
        raise ConfigError(f"temperature is {params.temperature}: use 0 for greedy, or a finite positive number")


def sample(logits: torch.Tensor, params: SamplingParams, position: int) -> Sampled:
    """Choose the token that stands at `position` of its sequence.

    Greedy at temperature 0, the lowest id among equals. Otherwise one uniform number drawn from (seed, position) is
    looked up in the cumulative distribution, in float64.

    Shapes: logits [vocab_size], any float dtype, any device.

    Raises:
        ComputeError: a logit is NaN or +inf, or all are -inf: the model computed nonsense.
    """
    values: npt.NDArray[np.float64] = logits.detach().to("cpu", torch.float64).numpy()
    peak = float(values.max())
    if not np.isfinite(peak):
        raise ComputeError(f"logits for position {position} peak at {peak}: the model's weights or KV are corrupt")
    centred = values - peak
    token = int(centred.argmax()) if params.temperature == 0.0 else _draw(centred, params, position)
    return Sampled(token, float(centred[token] - np.log(np.exp(centred).sum())))


def finish_reason(new_tokens: Sequence[int], params: SamplingParams, eos_token_ids: frozenset[int]) -> str | None:
    """Why generation ends after these tokens: "eos" (the last token is kept), "length", or None to go on."""
    if new_tokens and new_tokens[-1] in eos_token_ids and not params.ignore_eos:
        return "eos"
    return "length" if len(new_tokens) >= params.max_new_tokens else None


def _draw(centred: npt.NDArray[np.float64], params: SamplingParams, position: int) -> int:
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to exp(-inf) = 0
        cumulative = np.cumsum(np.exp(centred / params.temperature))
    target = _uniform(params.seed, position) * cumulative[-1]
    # "right" skips tokens of probability zero; the minimum guards against target rounding up to the very end.
    return int(min(np.searchsorted(cumulative, target, side="right"), np.searchsorted(cumulative, cumulative[-1])))


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
