"""What one process alone would generate: the answer a disaggregated run is compared with."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache

from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.sampling import finish_reason, sample
from kvferry.transfer.inference import SamplingParams


class Generated(NamedTuple):
    """Generated tokens and the natural-log probability of each; an end-of-sequence token is kept."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def generate_in_one_process(
    model: LoadedModel, prompt_token_ids: Sequence[int], sampling: SamplingParams, prefill_chunk_tokens: int
) -> Generated:
    """Prefill in chunks, then decode token by token, with the model's own cache and none of our pools.

    The chunk boundaries must be those of the run compared with: another order of summation is another result.
    """
    cache = DynamicCache(config=model.network.config)
    prompt = torch.tensor(list(prompt_token_ids), dtype=torch.int64)
    for start in range(0, len(prompt), prefill_chunk_tokens):
        logits = model.next_logits(prompt[start : start + prefill_chunk_tokens], cache)
    tokens: list[int] = []
    logprobs: list[float] = []
    while True:
        token, logprob = sample(logits, sampling, len(prompt) + len(tokens))
        tokens.append(token)
        logprobs.append(logprob)
        if finish_reason(tokens, sampling, model.tokenizer.eos_token_ids):
            return Generated(tuple(tokens), tuple(logprobs))
        logits = model.next_logits(torch.tensor([token]), cache)
