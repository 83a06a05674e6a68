"""Small real models for engine loops, and what one process alone makes of a prompt."""

from collections.abc import Callable, Sequence

import numpy as np
from transformers import LlamaConfig, PreTrainedConfig

from kvferry.cache.spec import from_transformers_config
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.hf import HfEngine
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.oracle import Generated, generate_in_one_process
from kvferry.transfer.engines.text import ByteTokenizer
from kvferry.transfer.engines.tiny_models import TinyModel, build_tiny_model
from kvferry.transfer.inference import SamplingParams

SAME_CHUNKS_TOLERANCE = 1e-5
"""Sums may be taken in another order by another process; a wrong page moves a log-probability by far more."""

OTHER_CHUNKS_TOLERANCE = {"tiny-gemma3": 2e-3}
"""Reuse moves the cuts between the chunks of a prompt. So large are the differences, two to three times, when the model
alone computes it in other chunks; one altered token of a prompt moves a log-probability by ten times more."""

DEFAULT_OTHER_CHUNKS_TOLERANCE = 1e-4

FIRST_BYTE_TOKEN, NUM_BYTES = 3, 256
TINY_LLAMA = "tiny-llama"


def _llama_config() -> PreTrainedConfig:
    """Full attention in every layer."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=384,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


def tiny_model(name: str) -> LoadedModel:
    """One of kvferry's tiny models, or the small Llama that only tests have."""
    if name != TINY_LLAMA:
        return load_model(name)
    recipe = TinyModel(_llama_config, gains={"q_proj": 4.0, "v_proj": 16.0, "o_proj": 16.0})
    network = build_tiny_model(recipe, "eager").eval().requires_grad_(False)
    spec = from_transformers_config(network.config.to_dict(), name=name, dtype="float32")
    return LoadedModel(name, network, ByteTokenizer(), spec, name)


def engine_of(model: LoadedModel) -> Callable[[], Engine]:
    return lambda: HfEngine(model)


def random_prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Byte tokens drawn from a fixed seed; one seed's prompts are no prefixes of each other."""
    drawn = np.random.default_rng([seed, num_tokens]).integers(
        FIRST_BYTE_TOKEN, FIRST_BYTE_TOKEN + NUM_BYTES, num_tokens
    )
    return tuple(drawn.tolist())


def cold_run(model: LoadedModel, prompt: Sequence[int], new_tokens: int, chunk_tokens: int) -> Generated:
    """The answer of one process, whose cache holds nothing at first."""
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    return generate_in_one_process(model, prompt, sampling, chunk_tokens)


def logprob_tolerance(model: LoadedModel, reused_tokens: int) -> float:
    """How far log-probabilities may be from a cold run's when so much of the prompt was reused."""
    other = OTHER_CHUNKS_TOLERANCE.get(model.name, DEFAULT_OTHER_CHUNKS_TOLERANCE)
    return other if reused_tokens else SAME_CHUNKS_TOLERANCE
