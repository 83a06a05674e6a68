"""What a model's configuration says of its cache: recurrent states beside keys and values."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.cache.layout import build_layout
from kvferry.cache.spec import BufferSpec, StateSpec, from_transformers_config
from tests.cache.specs import spec

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
KEY_AND_VALUE = (BufferSpec("key", 2, 16), BufferSpec("value", 2, 16))
QWEN3_NEXT = HEADS | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "dtype": "bfloat16",
}
NEMOTRON_H = HEADS | {
    "model_type": "nemotron_h",
    "layers_block_type": ["mlp", "linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "conv_kernel": 3,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 24, "mamba_d_conv": 4}
FALCON_H1 = HEADS | MAMBA | {"model_type": "falcon_h1", "num_hidden_layers": 2}
BAMBA = HEADS | MAMBA | {"model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1]}


def test_spec_qwen3_next_has_states_where_attention_is_linear() -> None:
    layers = from_transformers_config(QWEN3_NEXT).layers
    states = (StateSpec("conv_state", (2 * 2 * 8 + 6 * 16, 4)), StateSpec("recurrent_state", (6, 8, 16), "float32"))
    assert [layer.states for layer in layers] == [states] * 3 + [()]
    assert [layer.buffers for layer in layers] == [()] * 3 + [KEY_AND_VALUE]


def test_spec_nemotron_h_keeps_global_layer_ids_and_leaves_out_what_caches_nothing() -> None:
    layers = from_transformers_config(NEMOTRON_H).layers
    states = (StateSpec("conv_state", (8 * 16 + 2 * 2 * 32, 3)), StateSpec("ssm_state", (8, 16, 32), "float32"))
    assert [layer.layer_id for layer in layers] == [1, 3, 4]
    assert [layer.states for layer in layers] == [states, (), states]
    assert [layer.buffers for layer in layers] == [(), KEY_AND_VALUE, ()]


def test_spec_falcon_h1_layers_have_attention_and_a_state_under_one_id() -> None:
    layers = from_transformers_config(FALCON_H1).layers
    states = (StateSpec("conv_state", (8 * 16 + 2 * 24, 4)), StateSpec("ssm_state", (8, 16, 24), "float32"))
    assert [(layer.layer_id, layer.buffers, layer.states) for layer in layers] == [
        (0, KEY_AND_VALUE, states),
        (1, KEY_AND_VALUE, states),
    ]


def test_spec_bamba_has_attention_at_the_listed_layers_only() -> None:
    layers = from_transformers_config(BAMBA).layers
    assert [bool(layer.states) for layer in layers] == [True, False, True]
    assert [bool(layer.buffers) for layer in layers] == [False, True, False]


def test_layout_of_recurrent_states_keeps_float32_beside_the_models_dtype() -> None:
    layout = build_layout(from_transformers_config(QWEN3_NEXT))
    recurrent = layout.recurrent
    assert recurrent is not None
    assert {(view.role, view.dtype) for view in recurrent.states} == {
        ("conv_state", "bfloat16"),
        ("recurrent_state", "float32"),
    }
    assert recurrent.slot_bytes >= 3 * (128 * 4 * 2 + 6 * 8 * 16 * 4)


@pytest.mark.parametrize(
    "config, told",
    [
        (QWEN3_NEXT | {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
        (QWEN3_NEXT | {"model_type": "olmo_hybrid"}, "'olmo_hybrid' has type 'linear_attention'"),
        (QWEN3_NEXT | {"layer_types": ["conv"] * 4}, "'conv'"),
        (HEADS | {"model_type": "jamba", "layers_block_type": ["hybrid"]}, "qwen3_next, nemotron_h, falcon_h1, bamba"),
        (QWEN3_NEXT | {"linear_num_value_heads": None}, "'linear_num_value_heads'"),
        (NEMOTRON_H | {"conv_kernel": "auto"}, "'conv_kernel'"),
        (NEMOTRON_H | {"layers_block_type": ["mlp", "moe"]}, "no layer"),
    ],
)
def test_spec_of_layers_that_pools_cannot_hold_is_refused_by_name(config: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        from_transformers_config(config)


def test_row_5_3_windows_are_widened_by_the_backoff() -> None:
    windows: list[int | None] = [None, 5, 15]
    widened = spec(windows).widened(1, 16)
    assert [layer.window for layer in widened.layers] == [None, 6, None]
    pattern = spec([5, 16, 15]).widened(1, 16)
    assert [layer.window for layer in pattern.layers] == [6, None, None]


def test_widening_by_nothing_only_turns_windows_of_the_longest_sequence_into_full_attention() -> None:
    assert [layer.window for layer in spec([5, 16, None]).widened(0, 16).layers] == [5, None, None]
