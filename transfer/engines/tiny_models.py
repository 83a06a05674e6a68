"""Small models with real architectures and windows, whose weights follow from a seed alone.

They exist to prove that a KV cache arrived intact, so their output must hang on every page they look back on. Random
weights of the usual size do not give that: the prompt drowns in the residual stream and greedy output ignores it. The
scales below were chosen so that one altered page, in any life cycle, changes the tokens generated after a prompt of
1500 tokens, and nearly always one altered token inside a window does.

Weights are uniform draws of a counter-based generator keyed by (seed, parameter name): the same bits in every process,
whatever the thread count, the processor or the order in which modules are built.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, PreTrainedConfig, PreTrainedModel

SEED = 1
_MAX_POSITIONS = 8192
_SHARED = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": _MAX_POSITIONS,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class TinyModel:
    """How to build one tiny model.

    Attributes:
        gains: factor on the scale that would keep a unit variance, by a part of the parameter's name.
        norms: value of a norm's weight as a function of its layer, by the norm's name; others stay neutral.
    """

    config: Callable[[], PreTrainedConfig]
    gains: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, Callable[[int], float]] = field(default_factory=dict)


def _gpt_oss_config() -> PreTrainedConfig:
    """Window 128 and full attention in turn; as many layers of each, so both life cycles share one pool group."""
    return GptOssConfig(
        architectures=["GptOssForCausalLM"],
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        sliding_window=128,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": _MAX_POSITIONS // 32,
        },
        **_SHARED,
    )


def _gemma3_config() -> PreTrainedConfig:
    """Five layers of window 512 to one of full attention: two slot sizes, so two pool groups."""
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=12,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
        sliding_window=512,
        intermediate_size=128,
        query_pre_attn_scalar=1,
        **_SHARED,
    )


def _growing(layer: int) -> float:
    """Gemma adds a norm's weight to one; later layers count for more, so that the last, full attention, is heard."""
    return float(2.0 * 1.25**layer - 1.0)


def _sharp(_layer: int) -> float:
    return 0.5


TINY_MODELS: Mapping[str, TinyModel] = {
    "tiny-gpt-oss": TinyModel(_gpt_oss_config, gains={"q_proj": 4.0, "v_proj": 16.0, "o_proj": 16.0}),
    "tiny-gemma3": TinyModel(
        _gemma3_config,
        norms={"q_norm": _sharp, "post_attention_layernorm": _growing, "post_feedforward_layernorm": _growing},
    ),
}


def build_tiny_model(recipe: TinyModel, attention: str) -> PreTrainedModel:
    """A model with seeded weights, float32, on the CPU. Leaves torch's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(
            recipe.config(), attn_implementation=attention, dtype=torch.float32
        )
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            if "norm" in key:
                _set_norm(recipe, key, parameter)
            else:
                draw = _uniform(key, tuple(parameter.shape)) * np.float32(_half_width(recipe, key, parameter.shape))
                parameter.copy_(torch.from_numpy(draw))
    return network


def _set_norm(recipe: TinyModel, key: str, parameter: torch.Tensor) -> None:
    match = re.search(r"layers\.(\d+)\.(?:\w+\.)?(\w+)\.weight", key)
    if match and match[2] in recipe.norms:
        parameter.fill_(recipe.norms[match[2]](int(match[1])))


def _uniform(key: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Uniform in [-1, 1), 24 random bits a value, exact in float32."""
    digest = hashlib.sha256(f"{SEED}:{key}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(int(np.prod(shape)))
    return (bits >> np.uint64(40)).astype(np.float32).reshape(shape) * np.float32(2.0**-23) - np.float32(1.0)


def _half_width(recipe: TinyModel, key: str, shape: torch.Size) -> float:
    """Half of the width of a parameter's distribution. Matrices are [out, in], experts' [expert, in, out]."""
    if len(shape) == 1 or key.endswith("bias"):
        return 0.1
    gain = next((gain for part, gain in recipe.gains.items() if part in key), 1.0)
    fan_in = 1 if "embed_tokens" in key else shape[1]
    return float(gain * (3.0 / fan_in) ** 0.5)
