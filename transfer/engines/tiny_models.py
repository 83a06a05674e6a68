"""Small models with real architectures, whose weights follow from a seed alone.

They exist to prove that a KV cache arrived intact, so their output must hang on every page they look back on. Random
weights of the usual size do not give that: the prompt drowns in the residual stream and greedy output ignores it. The
scales below were chosen so that one altered page, in any life cycle, changes the tokens generated after a prompt of
1500 tokens, and nearly always one altered token inside a window does. So does any one state of a recurrent layer.

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
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

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
        spreads: first and last of evenly spaced values over the heads, by a vector's name.
    """

    config: Callable[[], PreTrainedConfig]
    gains: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, Callable[[int], float]] = field(default_factory=dict)
    spreads: Mapping[str, tuple[float, float]] = field(default_factory=dict)


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


def _qwen3_next_config() -> PreTrainedConfig:
    """Three layers of gated delta rule to one of full attention."""
    return Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        **_SHARED,
    )


def _nemotron_h_config() -> PreTrainedConfig:
    """Mamba-2 and attention layers, and between them layers that cache nothing.

    The smallest time step is out of reach: transformers 5.24 applies it to chunks of several tokens and not to single
    ones, so that the same tokens in other chunks would have other states.
    """
    return NemotronHConfig(
        architectures=["NemotronHForCausalLM"],
        layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"] * 2,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        time_step_min=1e-9,
        chunk_size=64,
        intermediate_size=64,
        **_SHARED,
    )


def _falcon_h1_config() -> PreTrainedConfig:
    """Every layer has attention and a Mamba-2 state side by side."""
    return FalconH1Config(
        architectures=["FalconH1ForCausalLM"],
        num_hidden_layers=4,
        mamba_d_ssm=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_chunk_size=64,
        intermediate_size=64,
        **_SHARED,
    )


def _bamba_config() -> PreTrainedConfig:
    """Mamba-2 layers, and attention between them."""
    return BambaConfig(
        architectures=["BambaForCausalLM"],
        num_hidden_layers=5,
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_chunk_size=64,
        intermediate_size=64,
        **_SHARED,
    )


def _deepseek_v3_config() -> PreTrainedConfig:
    """Latent attention: one latent vector and one rotary part per token, whatever the number of heads."""
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        num_hidden_layers=4,
        first_k_dense_replace=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        **{key: value for key, value in _SHARED.items() if key not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4,
    )


def _growing(layer: int) -> float:
    """Gemma adds a norm's weight to one; later layers count for more, so that the last, full attention, is heard."""
    return float(2.0 * 1.25**layer - 1.0)


def _sharp(_layer: int) -> float:
    return 0.5


def _sharper(_layer: int) -> float:
    return 1.0


_MEMORY = {"A_log": (0.0, 0.0), "dt_bias": (-5.0, 0.0)}
"""Heads that forget within a token or two, and heads that remember a hundred."""


TINY_MODELS: Mapping[str, TinyModel] = {
    "tiny-gpt-oss": TinyModel(_gpt_oss_config, gains={"q_proj": 4.0, "v_proj": 16.0, "o_proj": 16.0}),
    "tiny-gemma3": TinyModel(
        _gemma3_config,
        norms={"q_norm": _sharp, "post_attention_layernorm": _growing, "post_feedforward_layernorm": _growing},
    ),
    "tiny-qwen3-next": TinyModel(
        _qwen3_next_config,
        gains={"v_proj": 16.0, "o_proj": 12.0, "out_proj": 12.0},
        norms={"q_norm": _sharper},
        spreads=_MEMORY,
    ),
    "tiny-nemotron-h": TinyModel(
        _nemotron_h_config,
        gains={"q_proj": 4.0, "v_proj": 16.0, "o_proj": 16.0, "out_proj": 16.0},
        spreads=_MEMORY,
    ),
    "tiny-falcon-h1": TinyModel(
        _falcon_h1_config,
        gains={"q_proj": 4.0, "v_proj": 8.0, "o_proj": 4.0, "out_proj": 32.0},
        spreads=_MEMORY | {"dt_bias": (-4.0, 1.0)},
    ),
    "tiny-bamba": TinyModel(
        _bamba_config,
        gains={"q_proj": 4.0, "v_proj": 16.0, "o_proj": 8.0, "out_proj": 24.0},
        spreads=_MEMORY,
    ),
    "tiny-deepseek-v3": TinyModel(_deepseek_v3_config, gains={"q_b_proj": 4.0, "o_proj": 2.0}),
}


def build_tiny_model(recipe: TinyModel, attention: str) -> PreTrainedModel:
    """A model with seeded weights, float32, on the CPU. Leaves torch's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(
            recipe.config(), attn_implementation=attention, dtype=torch.float32
        )
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            spread = recipe.spreads.get(key.rsplit(".", 1)[-1])
            if spread is not None:
                parameter.copy_(torch.linspace(*spread, len(parameter)))
            elif "norm" in key:
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
    fan_in = 1 if "embed" in key else max(shape[1], shape[-1]) if shape[1] == 1 else shape[1]
    return float(gain * (3.0 / fan_in) ** 0.5)
