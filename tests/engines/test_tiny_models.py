"""Tiny models have the real architectures and the same weights in every process."""

import hashlib
from collections.abc import Callable

import pytest
import torch

from kvferry.cache.layout import build_layout
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.models import load_model
from kvferry.transfer.engines.text import ByteTokenizer

ModelOf = Callable[[str], LoadedModel]


def weights_digest(model: LoadedModel) -> str:
    digest = hashlib.sha256()
    for key, parameter in sorted(model.network.named_parameters()):
        digest.update(key.encode() + parameter.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name, digest", [("tiny-gpt-oss", "62ce7eca4bf4f7cd"), ("tiny-gemma3", "bd48d42c06434f55")])
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


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-gemma3"])
def test_tiny_models_are_float32_and_speak_bytes(model_of: ModelOf, name: str) -> None:
    model = model_of(name)
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.float32}
    assert isinstance(model.tokenizer, ByteTokenizer)
    assert (model.vocab_size, model.spec.dtype) == (384, "float32")
    assert model.max_seq_len_tokens >= 4096
    assert not model.network.training
