import json
import math
from pathlib import Path

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import LifeCycleLayout, build_layout, build_static_layout
from kvferry.cache.lifecycle import LifeCycle
from kvferry.cache.spec import ITEM_BYTES, BufferSpec, LayerSpec, ModelSpec, StateSpec, from_transformers_config
from tests.cache.specs import attention, model, recurrent, spec

MODELS = Path(__file__).parents[2] / "benchmarks/models"


def touched_bytes(group: LifeCycleLayout, tokens_per_block: int) -> list[list[int]]:
    """How many values or states lie on each byte of the slot, per pool."""
    counts = [[0] * size for size in group.pool_bytes]
    for view in group.buffers:
        for head in range(view.num_heads):
            for token in range(tokens_per_block):
                start = view.offset_bytes + head * view.head_stride_bytes + token * view.token_stride_bytes
                for byte in range(start, start + view.head_dim * view.item_bytes):
                    counts[view.pool][byte] += 1
    for state in group.states:
        for byte in range(state.offset_bytes, state.offset_bytes + math.prod(state.shape) * ITEM_BYTES[state.dtype]):
            counts[0][byte] += 1
    return counts


# ---- grouping (pools specification 5.4)


def test_vector_5_4_equal_layers_make_one_life_cycle_and_one_pool() -> None:
    # 4 layers, K = V = 8192 bytes a block: slots of 65 536 bytes.
    layout = build_layout(spec([None] * 4, heads=4, head_dim=16), tokens_per_block=32)
    assert [group.slot_bytes for group in layout.pool_groups] == [65_536]
    assert len(layout.life_cycles) == 1


def test_vector_5_4_half_windowed_layers_share_one_pool_group() -> None:
    layout = build_layout(spec([128, None, 128, None], heads=4, head_dim=16), tokens_per_block=32)
    assert [group.life_cycles for group in layout.pool_groups] == [(0, 1)]
    assert [group.slot_bytes for group in layout.pool_groups] == [32_768]


def test_vector_5_4_unequal_sizes_make_two_pool_groups() -> None:
    # One windowed layer of 8192 bytes a buffer, one full layer of 16 384.
    layout = build_layout(
        model(attention(128, heads=4, head_dim=16), attention(heads=4, head_dim=32)), tokens_per_block=32
    )
    assert [group.slot_bytes for group in layout.pool_groups] == [16_384, 32_768]


@pytest.mark.parametrize("order", ["layer_major", "head_major"])
def test_vector_5_4_block_scales_lie_in_a_second_pool_of_the_group(order: str) -> None:
    layers = [attention(heads=4, head_dim=16, scale_dim=4)] * 2
    layout = build_layout(model(*layers), tokens_per_block=32, order=order)  # type: ignore[arg-type]
    assert [group.pool_bytes for group in layout.pool_groups] == [(32_768, 2_048)]
    assert {view.role: view.pool for view in layout.life_cycles[0].buffers} == {
        "key": 0,
        "value": 0,
        "key_block_scale": 1,
        "value_block_scale": 1,
    }
    assert layout.life_cycles[0].sub_pages == 1


def test_unequal_layer_counts_make_two_pool_groups() -> None:
    layout = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    assert [group.life_cycles for group in layout.pool_groups] == [(0,), (1,)]
    assert layout.pool_groups[0].slot_bytes == 5 * layout.pool_groups[1].slot_bytes


def test_equal_total_bytes_in_other_pools_do_not_share_a_group() -> None:
    with_scales, without = attention(8, heads=1, head_dim=8, scale_dim=8), attention(heads=1, head_dim=10)
    layout = build_layout(model(with_scales, without), tokens_per_block=4)
    assert [group.pool_bytes for group in layout.pool_groups] == [(256, 64), (320,)]


def test_unequal_buffers_of_a_layer_lie_side_by_side_in_one_pool() -> None:
    buffers = (BufferSpec("key", 1, 16), BufferSpec("value", 1, 4), BufferSpec("index_key", 1, 2, "uint8"))
    layout = build_layout(ModelSpec("test", "float32", (LayerSpec(LayerId(0), None, buffers),)), tokens_per_block=4)
    assert [group.pool_bytes for group in layout.pool_groups] == [(4 * (64 + 16 + 2),)]
    assert [view.offset_bytes for view in layout.life_cycles[0].buffers] == [0, 256, 320]


def test_sinks_of_one_token_more_make_a_life_cycle_of_their_own() -> None:
    layers = [attention(64, sink_tokens=tokens) for tokens in (0, 1, 8, 9)]
    layout = build_layout(model(*layers), tokens_per_block=8)
    assert [group.life_cycle for group in layout.life_cycles] == [
        LifeCycle(64),
        LifeCycle(64, 1),
        LifeCycle(64, 2),
    ]
    assert layout.life_cycles[1].layer_ids == (1, 2)


# ---- bytes


@pytest.mark.parametrize("order", ["layer_major", "head_major"])
@pytest.mark.parametrize("scale_dim", [0, 4])
def test_buffers_tile_the_slot_exactly(order: str, scale_dim: int) -> None:
    layers = [attention(window, scale_dim=scale_dim) for window in (None, 8, None)]
    layout = build_layout(model(*layers), tokens_per_block=4, order=order)  # type: ignore[arg-type]
    for group in layout.life_cycles:
        assert all(set(pool) == {1} for pool in touched_bytes(group, 4))


@pytest.mark.parametrize("order", ["layer_major", "head_major"])
def test_buffers_of_mixed_dtypes_are_aligned_and_never_overlap(order: str) -> None:
    buffers = (BufferSpec("index_key", 1, 3, "uint8"), BufferSpec("key", 1, 5), BufferSpec("value", 1, 3, "float16"))
    layers = tuple(LayerSpec(LayerId(index), None, buffers) for index in range(2))
    layout = build_layout(ModelSpec("test", "float32", layers), tokens_per_block=3, order=order)  # type: ignore[arg-type]
    group = layout.life_cycles[0]
    assert max(map(max, touched_bytes(group, 3))) == 1
    for view in group.buffers:
        assert view.offset_bytes % view.item_bytes == 0
        assert view.head_stride_bytes % view.item_bytes == 0
    assert group.slot_bytes % 4 == 0


def test_sub_pages_are_the_equal_layers_of_a_slot() -> None:
    layout = build_layout(spec([8] * 3 + [None]), tokens_per_block=4)
    assert [group.sub_pages for group in layout.life_cycles] == [3, 1]
    size = layout.life_cycles[0].slot_bytes // 3
    assert [view.offset_bytes // size for view in layout.life_cycles[0].buffers] == [0, 0, 1, 1, 2, 2]


def test_sub_pages_of_unequal_or_head_major_layers_are_the_whole_slot() -> None:
    unequal = build_layout(model(attention(8), attention(8, head_dim=4)), tokens_per_block=4)
    assert unequal.life_cycles[0].sub_pages == 1
    assert build_layout(spec([8, 8]), tokens_per_block=4, order="head_major").life_cycles[0].sub_pages == 1


# ---- recurrent states


def test_states_of_all_layers_make_one_life_cycle() -> None:
    layout = build_layout(model(recurrent(3, 4), attention(), recurrent(3, 4)), tokens_per_block=4)
    assert [group.life_cycle.recurrent for group in layout.life_cycles] == [True, False]
    assert layout.recurrent is layout.life_cycles[0]
    assert [(view.layer_id, view.offset_bytes) for view in layout.life_cycles[0].states] == [(0, 0), (2, 48)]
    assert layout.life_cycles[0].pool_bytes == (96,)
    assert layout.state(2, "ssm_state")[1].shape == (3, 4)


def test_states_of_mixed_dtypes_are_aligned_and_never_overlap() -> None:
    states = (StateSpec("conv_state", (3,), "bfloat16"), StateSpec("ssm_state", (2, 2), "float32"))
    layers = tuple(LayerSpec(LayerId(index), None, states=states) for index in range(2))
    group = build_layout(ModelSpec("test", "bfloat16", layers)).life_cycles[0]
    assert max(map(max, touched_bytes(group, 1))) == 1
    assert [view.offset_bytes for view in group.states] == [0, 8, 24, 32]
    assert group.slot_bytes == 48


def test_layer_with_attention_and_state_belongs_to_two_life_cycles() -> None:
    both = LayerSpec(LayerId(0), None, (BufferSpec("key", 1, 4),), (StateSpec("ssm_state", (4,)),))
    layout = build_layout(ModelSpec("test", "float32", (both,)), tokens_per_block=4)
    assert [group.layer_ids for group in layout.life_cycles] == [(0,), (0,)]
    assert [group.life_cycle.recurrent for group in layout.life_cycles] == [False, True]


def test_model_without_recurrent_layers_has_no_recurrent_life_cycle() -> None:
    assert build_layout(spec([None])).recurrent is None


def test_buffer_and_state_that_do_not_exist_are_refused() -> None:
    layout = build_layout(model(attention(), recurrent(2)))
    with pytest.raises(ConfigError, match="no buffer 'key' of layer 1"):
        layout.buffer(1, "key")
    with pytest.raises(ConfigError, match="no state 'ssm_state' of layer 0"):
        layout.state(0, "ssm_state")


# ---- what is left out and what is refused


def test_layers_without_heads_or_values_disappear_and_the_others_keep_their_ids() -> None:
    layers = [attention(heads=0), attention(head_dim=0), attention(), attention(heads=0), attention()]
    layout = build_layout(model(*layers))
    assert layout.life_cycles[0].layer_ids == (2, 4)


def test_model_that_caches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="caches nothing"):
        build_layout(model(attention(heads=0)))


@pytest.mark.parametrize("tokens_per_block", [0, -4])
def test_block_without_tokens_is_refused(tokens_per_block: int) -> None:
    with pytest.raises(ConfigError, match="tokens_per_block"):
        build_layout(spec([None]), tokens_per_block=tokens_per_block)


# ---- the static layout


def test_static_layout_one_pool_per_window_and_head_count() -> None:
    layers = [attention(8), attention(), attention(8, heads=4), attention(8), attention(heads=4)]
    layout = build_static_layout(model(*layers), tokens_per_block=4)
    assert [(group.life_cycle.window, group.layer_ids) for group in layout.life_cycles] == [
        (8, (0, 3)),
        (None, (1,)),
        (8, (2,)),
        (None, (4,)),
    ]
    assert [group.life_cycles for group in layout.pool_groups] == [(0,), (1,), (2,), (3,)]


def test_static_layout_never_shares_a_pool() -> None:
    halves = spec([128, None, 128, None])
    assert len(build_layout(halves).pool_groups) == 1
    assert len(build_static_layout(halves).pool_groups) == 2


def test_static_layout_pads_rows_to_the_longest_head() -> None:
    layers = model(attention(head_dim=4), attention(head_dim=8))
    tight, padded = build_layout(layers, tokens_per_block=4), build_static_layout(layers, tokens_per_block=4)
    assert {view.token_stride_bytes for view in padded.life_cycles[0].buffers} == {32}
    assert [view.head_dim for view in padded.life_cycles[0].buffers] == [4, 4, 8, 8]
    assert (tight.pool_groups[0].slot_bytes, padded.pool_groups[0].slot_bytes) == (768, 1024)
    assert max(map(max, touched_bytes(padded.life_cycles[0], 4))) == 1


def test_static_layout_states_have_a_pool_of_their_own() -> None:
    # A slot of states as large as one of pages shares its pool only in the other layout.
    layers = model(attention(heads=1, head_dim=8), recurrent(64))
    assert len(build_layout(layers, tokens_per_block=4).pool_groups) == 1
    assert [group.pool_bytes for group in build_static_layout(layers, tokens_per_block=4).pool_groups] == [
        (256,),
        (256,),
    ]


# ---- slot order and digest


def test_head_major_head_is_one_run_over_all_layers() -> None:
    layout = build_layout(spec([None, None]), tokens_per_block=4, order="head_major")
    group = layout.life_cycles[0]
    assert {view.head_stride_bytes for view in group.buffers} == {group.slot_bytes // 2}


def test_head_major_unequal_head_counts_are_refused() -> None:
    layers = tuple(LayerSpec(LayerId(i), None, (BufferSpec("key", heads, 8),)) for i, heads in enumerate((1, 2)))
    with pytest.raises(ConfigError, match="head count"):
        build_layout(ModelSpec("test", "float32", layers), order="head_major")


def test_digest_differs_when_geometry_differs() -> None:
    digests = {
        build_layout(spec(windows), tokens_per_block=block, order=order).digest  # type: ignore[arg-type]
        for windows in ([None, None], [None, 8])
        for block in (4, 8)
        for order in ("layer_major", "head_major")
    }
    assert len(digests) == 8


def test_digest_does_not_depend_on_the_name() -> None:
    layers = spec([None, 8]).layers
    digests = {build_layout(ModelSpec(name, "float32", layers)).digest for name in ("one", "other")}
    assert len(digests) == 1


# ---- reading a model's configuration


def test_spec_gemma3_style_config_reads_windows_and_heads() -> None:
    config = {
        "text_config": {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "hidden_size": 640,
            "dtype": "bfloat16",
        },
        "architectures": ["Gemma3ForConditionalGeneration"],
    }
    gemma = from_transformers_config(config)
    assert [layer.window for layer in gemma.layers] == [512] * 5 + [None]
    assert gemma.layers[0].buffers == (BufferSpec("key", 1, 256), BufferSpec("value", 1, 256))
    assert (gemma.name, gemma.dtype, gemma.item_bytes_of(None)) == ("Gemma3ForConditionalGeneration", "bfloat16", 2)


@pytest.mark.parametrize(
    "use_sliding_window, expected", [(True, [4096, 4096]), (False, [None, None]), (None, [4096, 4096])]
)
def test_spec_without_layer_types_follows_the_sliding_window(
    use_sliding_window: bool | None, expected: list[int | None]
) -> None:
    config = {
        "num_hidden_layers": 2,
        "sliding_window": 4096,
        "num_attention_heads": 2,
        "hidden_size": 32,
        "use_sliding_window": use_sliding_window,
    }
    assert [layer.window for layer in from_transformers_config(config).layers] == expected


@pytest.mark.parametrize(
    "storage, buffers",
    [
        ("joint", (BufferSpec("key", 1, 576),)),
        ("split", (BufferSpec("key", 1, 512), BufferSpec("value", 1, 64))),
    ],
)
def test_spec_mla_config_gives_the_storage_asked_for(storage: str, buffers: tuple[BufferSpec, ...]) -> None:
    config = {
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "hidden_size": 2048,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    assert from_transformers_config(config, mla=storage).layers[0].buffers == buffers  # type: ignore[arg-type]


def test_spec_layers_that_share_kv_have_no_buffers_of_their_own() -> None:
    config = {"num_hidden_layers": 4, "num_kv_shared_layers": 1, "num_attention_heads": 2, "hidden_size": 32}
    assert len(from_transformers_config(config).layers) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None},
        {"num_hidden_layers": None},
        {"num_attention_heads": None},
        {"dtype": "int3"},
    ],
)
def test_spec_config_that_pools_cannot_hold_is_refused(change: dict[str, object]) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, **change}
    with pytest.raises(ConfigError):
        from_transformers_config(config)


@pytest.mark.parametrize(
    "name, architecture, windows, heads, head_dim, pool_groups",
    [
        ("gpt-oss-120b", "GptOssForCausalLM", [128, None] * 18, 8, 64, 1),
        ("gemma-3-27b", "Gemma3ForCausalLM", ([1024] * 5 + [None]) * 10 + [1024] * 2, 16, 128, 2),
        ("llama-3-70b", "LlamaForCausalLM", [None] * 80, 8, 128, 1),
    ],
)
def test_spec_named_model_is_read_from_its_file(
    name: str, architecture: str, windows: list[int | None], heads: int, head_dim: int, pool_groups: int
) -> None:
    described = from_transformers_config(json.loads((MODELS / f"{name}.json").read_text()))
    assert (described.name, described.dtype) == (architecture, "bfloat16")
    assert [layer.window for layer in described.layers] == windows
    both = (BufferSpec("key", heads, head_dim), BufferSpec("value", heads, head_dim))
    assert {layer.buffers for layer in described.layers} == {both}
    layout = build_layout(described)
    assert len(layout.pool_groups) == pool_groups
    # Every page of all life cycles together: one block of all layers.
    assert sum(group.slot_bytes for group in layout.life_cycles) == len(windows) * 2 * heads * head_dim * 2 * 32
