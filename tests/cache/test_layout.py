import pytest

from kvferry.cache.errors import ConfigError
from kvferry.cache.ids import LayerId
from kvferry.cache.layout import build_layout
from kvferry.cache.spec import BufferSpec, LayerSpec, ModelSpec, from_transformers_config
from tests.cache.specs import spec


def test_equal_layers_make_one_life_cycle_and_one_pool() -> None:
    # 4 layers, K = V = 8192 bytes a block: slots of 65 536 bytes.
    layout = build_layout(spec([None] * 4, heads=4, head_dim=16), tokens_per_block=32)
    assert [group.slot_bytes for group in layout.pool_groups] == [65_536]
    assert len(layout.life_cycles) == 1


def test_half_windowed_layers_share_one_pool_group() -> None:
    layout = build_layout(spec([128, None, 128, None], heads=4, head_dim=16), tokens_per_block=32)
    assert [group.life_cycles for group in layout.pool_groups] == [(0, 1)]
    assert [group.slot_bytes for group in layout.pool_groups] == [32_768]


def test_unequal_layer_counts_make_two_pool_groups() -> None:
    layout = build_layout(spec([512] * 5 + [None]), tokens_per_block=32)
    assert [group.life_cycles for group in layout.pool_groups] == [(0,), (1,)]
    assert layout.pool_groups[0].slot_bytes == 5 * layout.pool_groups[1].slot_bytes


@pytest.mark.parametrize("order", ["layer_major", "head_major"])
def test_buffers_tile_the_slot_exactly(order: str) -> None:
    layout = build_layout(spec([None, 8, None]), tokens_per_block=4, order=order)  # type: ignore[arg-type]
    for group in layout.life_cycles:
        touched = [0] * group.slot_bytes
        for view in group.buffers:
            for head in range(view.num_heads):
                for token in range(4):
                    start = view.offset_bytes + head * view.head_stride_bytes + token * view.token_stride_bytes
                    for byte in range(start, start + view.head_dim * layout.item_bytes):
                        touched[byte] += 1
        assert set(touched) == {1}


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
    model = from_transformers_config(config)
    assert [layer.window for layer in model.layers] == [512] * 5 + [None]
    assert model.layers[0].buffers == (BufferSpec("key", 1, 256), BufferSpec("value", 1, 256))
    assert (model.name, model.dtype, model.item_bytes) == ("Gemma3ForConditionalGeneration", "bfloat16", 2)


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
