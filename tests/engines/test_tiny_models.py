"""Tiny models have the real architectures and the same weights in every process."""

import hashlib
from collections.abc import Callable

import pytest
import torch

from kvferry.cache.layout import build_layout
from kvferry.cache.spec import BufferSpec
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.text import ByteTokenizer
from kvferry.transfer.engines.tiny_models import TINY_MODELS

ModelOf = Callable[[str], LoadedModel]


def weights_digest(model: LoadedModel) -> str:
    digest = hashlib.sha256()
    for key, parameter in sorted(model.network.named_parameters()):
        digest.update(key.encode() + parameter.numpy().tobytes())
    return digest.hexdigest()


PINNED = {
    "tiny-gpt-oss": "62ce7eca4bf4f7cd",
    "tiny-gemma3": "bd48d42c06434f55",
    "tiny-qwen3-next": "59d916d0d20cb410",
    "tiny-nemotron-h": "a6c41399ac1c36bc",
    "tiny-falcon-h1": "1f730670e74a013a",
    "tiny-bamba": "eb65228f1d818999",
    "tiny-deepseek-v3": "8c88df7386d3954b",
}


def test_every_tiny_model_is_pinned() -> None:
    assert PINNED.keys() == TINY_MODELS.keys()


@pytest.mark.parametrize("name, digest", PINNED.items())
def test_weights_are_the_pinned_ones(model_of: ModelOf, name: str, digest: str) -> None:
    """Bits of the weights, the same in every process and on every machine: workers must not differ in them."""
    assert weights_digest(model_of(name))[:16] == digest


def test_weights_depend_on_neither_random_state_nor_threads(model_of: ModelOf) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(77)
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        state = torch.random.get_rng_state()
        again = load_model("tiny-gpt-oss")
        assert torch.equal(state, torch.random.get_rng_state())
    finally:
        torch.set_num_threads(threads)
    assert weights_digest(again) == weights_digest(model_of("tiny-gpt-oss"))
    assert again.digest == model_of("tiny-gpt-oss").digest


def test_gpt_oss_alternates_windows_and_shares_one_pool_group(model_of: ModelOf) -> None:
    model = model_of("tiny-gpt-oss")
    assert [layer.window for layer in model.spec.layers] == [128, None] * 3
    layout = build_layout(model.spec)
    assert (len(layout.life_cycles), len(layout.pool_groups)) == (2, 1)


def test_gemma3_has_five_windows_to_one_full_layer_and_two_pool_groups(model_of: ModelOf) -> None:
    model = model_of("tiny-gemma3")
    assert [layer.window for layer in model.spec.layers] == ([512] * 5 + [None]) * 2
    layout = build_layout(model.spec)
    assert (len(layout.life_cycles), len(layout.pool_groups)) == (2, 2)


@pytest.mark.parametrize(
    "name, life_cycles",
    [
        ("tiny-qwen3-next", {"recurrent": [0, 1, 2, 4, 5, 6], "full": [3, 7]}),
        ("tiny-nemotron-h", {"recurrent": [0, 2, 5, 7], "full": [3, 8]}),
        ("tiny-falcon-h1", {"recurrent": [0, 1, 2, 3], "full": [0, 1, 2, 3]}),
        ("tiny-bamba", {"recurrent": [0, 2, 4], "full": [1, 3]}),
        ("tiny-deepseek-v3", {"full": [0, 1, 2, 3]}),
    ],
)
def test_recurrent_and_latent_models_have_these_layers(
    model_of: ModelOf, name: str, life_cycles: dict[str, list[int]]
) -> None:
    layout = build_layout(model_of(name).spec)
    assert {str(group.life_cycle): list(group.layer_ids) for group in layout.life_cycles} == life_cycles


def test_deepseek_caches_one_latent_and_one_rotary_vector_per_token(model_of: ModelOf) -> None:
    layers = model_of("tiny-deepseek-v3").spec.layers
    assert {layer.buffers for layer in layers} == {(BufferSpec("key", 1, 32), BufferSpec("value", 1, 8))}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_models_are_float32_and_speak_bytes(model_of: ModelOf, name: str) -> None:
    model = model_of(name)
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.float32}
    assert isinstance(model.tokenizer, ByteTokenizer)
    assert (model.vocab_size, model.spec.dtype) == (384, "float32")
    assert model.max_seq_len_tokens >= 4096
    assert not model.network.training
