"""Keys and values in the pools give, to the bit, the logits of transformers' own cache."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvferry.cache.admission import PoolOptions
from kvferry.cache.errors import ConfigError, InvariantError, LocalProtocolError
from kvferry.cache.layout import build_layout, build_static_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.static_manager import StaticKVCacheManager
from kvferry.transfer.engines.hf import HfEngine
from kvferry.transfer.engines.hf_cache import CacheViews, PooledCache
from kvferry.transfer.engines.loaded_model import LoadedModel
from tests.engines import helpers

ModelOf = Callable[[str], LoadedModel]

RECURRENT = ["tiny-qwen3-next", "tiny-nemotron-h", "tiny-falcon-h1", "tiny-bamba"]
MODELS = ["tiny-gpt-oss", "tiny-gemma3", "tiny-deepseek-v3", *RECURRENT, "llama", "mistral"]
LENGTHS = [1, 32, 33, 64, 127, 128, 129, 160, 511, 512, 513, 544, 545]
NUM_DECODE = 3


@pytest.mark.parametrize("chunk_tokens", [1000, 100])
@pytest.mark.parametrize("name", MODELS)
def test_forward_around_the_windows_equals_dynamic_cache(model_of: ModelOf, name: str, chunk_tokens: int) -> None:
    model = model_of(name)
    engine, manager = helpers.bound_engine(model)
    for length in LENGTHS:
        prompt = helpers.random_prompt(length, seed=length)
        wanted = helpers.reference_logits(model, prompt, chunk_tokens, NUM_DECODE)
        sequence = helpers.open_sequence(manager, length, chunk_tokens=chunk_tokens)
        found = helpers.prefill(engine, sequence, prompt, chunk_tokens)
        tokens = prompt
        for _ in range(NUM_DECODE):
            tokens = np.append(tokens, found[-1].argmax())
            found.append(helpers.step(engine, sequence, tokens))
        sequence.close()
        assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True)), f"{length} tokens"
    manager.check_integrity()


@pytest.mark.parametrize("chunk_tokens", [32, 64, 127, 128, 129])
@pytest.mark.parametrize("name", MODELS)
def test_forward_in_chunks_around_block_and_window_equals_dynamic_cache(
    model_of: ModelOf, name: str, chunk_tokens: int
) -> None:
    model, prompt = model_of(name), helpers.random_prompt(545)
    engine, manager = helpers.bound_engine(model)
    wanted = helpers.reference_logits(model, prompt, chunk_tokens, 0)
    found = helpers.prefill(
        engine, helpers.open_sequence(manager, 545, chunk_tokens=chunk_tokens), prompt, chunk_tokens
    )
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "llama", "tiny-deepseek-v3", *RECURRENT])
def test_forward_token_by_token_equals_dynamic_cache(model_of: ModelOf, name: str) -> None:
    model = model_of(name)
    engine, manager = helpers.bound_engine(model)
    prompt = helpers.random_prompt(135)
    sequence = helpers.open_sequence(manager, len(prompt), chunk_tokens=1)
    wanted = helpers.reference_logits(model, prompt, 1, 0)
    found = helpers.prefill(engine, sequence, prompt, 1)
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))


def test_forward_continuing_with_several_tokens_past_the_window_equals_dynamic_cache(model_of: ModelOf) -> None:
    model = model_of("tiny-gpt-oss")
    engine, manager = helpers.bound_engine(model)
    prompt = helpers.random_prompt(700)
    wanted = helpers.reference_logits(model, prompt, 37, 0)
    sequence = helpers.open_sequence(manager, len(prompt), chunk_tokens=37)
    found = helpers.prefill(engine, sequence, prompt, 37)
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))


@pytest.mark.parametrize("tokens_per_block", [1, 16, 64])
def test_forward_with_other_block_sizes_equals_dynamic_cache(model_of: ModelOf, tokens_per_block: int) -> None:
    model = model_of("tiny-gpt-oss")
    engine, manager = helpers.bound_engine(
        model, helpers.make_manager(model.spec, 700, tokens_per_block=tokens_per_block)
    )
    prompt = helpers.random_prompt(200)
    sequence = helpers.open_sequence(manager, len(prompt), chunk_tokens=90)
    found = helpers.prefill(engine, sequence, prompt, 90)
    assert torch.equal(found[-1], helpers.reference_logits(model, prompt, 90, 0)[-1])


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-gemma3", "tiny-deepseek-v3", "tiny-falcon-h1"])
def test_head_major_layout_gives_the_logits_of_layer_major(model_of: ModelOf, name: str) -> None:
    model, prompt = model_of(name), helpers.random_prompt(600)
    results = []
    for order in ("layer_major", "head_major"):
        engine, manager = helpers.bound_engine(model, helpers.make_manager(model.spec, order=order))
        sequence = helpers.open_sequence(manager, len(prompt))
        results.append(helpers.prefill(engine, sequence, prompt, 256)[-1])
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["tiny-gpt-oss", *RECURRENT])
def test_interleaved_sequences_do_not_touch_each_other(model_of: ModelOf, name: str) -> None:
    model = model_of(name)
    engine, manager = helpers.bound_engine(model)
    prompts = [helpers.random_prompt(length, seed=length) for length in (200, 150, 331)]
    sequences = [helpers.open_sequence(manager, len(p), chunk_tokens=50, name=str(len(p))) for p in prompts]
    last: dict[int, torch.Tensor] = {}
    for start in range(0, 350, 50):
        for index, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
            if start < len(prompt):
                last[index] = helpers.step(engine, sequence, prompt[: start + 50])
    wanted = [helpers.reference_logits(model, prompt, 50, 0)[-1] for prompt in prompts]
    assert all(torch.equal(last[index], logits) for index, logits in enumerate(wanted))


@pytest.mark.parametrize("history, num_new", [(0, 1), (0, 300), (126, 1), (127, 1), (128, 1), (128, 40), (400, 7)])
def test_mask_sizes_are_those_of_dynamic_cache(model_of: ModelOf, history: int, num_new: int) -> None:
    model = model_of("tiny-gpt-oss")
    _engine, manager = helpers.bound_engine(model)
    sequence = helpers.open_sequence(manager, 500, chunk_tokens=500)
    sequence.resize(capacity=history)
    sequence.resize(history=history, capacity=history + num_new)
    pooled = PooledCache(CacheViews(manager), sequence, num_new)
    dynamic = DynamicCache(config=model.network.config)
    shape = (1, 2, history, 16)
    for layer in range(len(dynamic.layers)):
        if history:
            dynamic.update(torch.zeros(shape), torch.zeros(shape), layer)
    assert pooled.is_sliding == dynamic.is_sliding
    for layer in range(len(dynamic.layers)):
        assert pooled.get_mask_sizes(num_new, layer) == dynamic.get_mask_sizes(num_new, layer)
        assert pooled.get_seq_length(layer) == dynamic.get_seq_length(layer) == history
        new = torch.zeros((1, 2, num_new, 16))
        shapes = [[part.shape for part in cache.update(new, new, layer)] for cache in (pooled, dynamic)]
        assert shapes[0] == shapes[1]
        assert pooled.get_seq_length(layer) == dynamic.get_seq_length(layer) == history + num_new
        assert pooled.get_mask_sizes(1, layer) == dynamic.get_mask_sizes(1, layer)
        assert pooled.get_max_length(layer) == dynamic.get_max_length(layer)


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-deepseek-v3", "tiny-nemotron-h", "tiny-falcon-h1"])
def test_pools_of_the_v1_manager_give_the_same_logits(model_of: ModelOf, name: str) -> None:
    model, prompt = model_of(name), helpers.random_prompt(600)
    layout = build_static_layout(model.spec)
    manager = StaticKVCacheManager(layout, [60] * len(layout.pool_groups))
    engine, _ = helpers.bound_engine(model, manager)
    found = helpers.prefill(engine, helpers.open_sequence(manager, 600, chunk_tokens=250), prompt, 250)
    wanted = helpers.reference_logits(model, prompt, 250, 0)
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))
    manager.check_integrity()


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-gemma3"])
def test_scratch_pages_give_the_same_logits(model_of: ModelOf, name: str) -> None:
    """Blocks that leave the window within a chunk have no page of their own: layers take turns in them."""
    model, prompt = model_of(name), helpers.random_prompt(1500)
    layout = build_layout(model.spec)
    manager = KVCacheManager(layout, [80] * len(layout.pool_groups), options=PoolOptions(window_scratch=True))
    engine, _ = helpers.bound_engine(model, manager)
    sequence = manager.create_sequence("r")
    sequence.resume()
    sequence.resize(capacity=1000)
    windowed = next(group for group in layout.life_cycles if group.life_cycle.window is not None)
    indices = [sequence.page_indices(windowed.id, layer) for layer in windowed.layer_ids]
    own = sequence.slots(windowed.id) >= 0
    assert all((index >= 0).all() for index in indices)
    assert not own.all()
    found = helpers.prefill(engine, sequence, prompt, 1000)
    wanted = helpers.reference_logits(model, prompt, 1000, 0)
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))
    manager.check_integrity()


def test_model_of_another_shape_than_the_pools_raises_with_both_shapes(model_of: ModelOf) -> None:
    small, other = model_of("llama"), model_of("mistral")
    manager = helpers.make_manager(small.spec)
    liar = HfEngine(LoadedModel("liar", other.network, other.tokenizer, small.spec, "digest"))
    liar.bind(manager)
    sequence = helpers.open_sequence(manager, 10)
    sequence.resize(capacity=10)
    with pytest.raises(ConfigError, match=r"layer 0 key: the model gives \[1, 4, 10, 12\].*hold \[1, 1, 10, 24\]"):
        liar.forward(sequence, helpers.random_prompt(10))


def test_model_of_another_dtype_than_the_pools_raises(model_of: ModelOf) -> None:
    model = model_of("llama")
    spec = type(model.spec)(model.spec.name, "bfloat16", model.spec.layers)
    engine = HfEngine(LoadedModel("half", model.network, model.tokenizer, spec, "digest"))
    manager = helpers.make_manager(spec)
    engine.bind(manager)
    sequence = helpers.open_sequence(manager, 10)
    sequence.resize(capacity=10)
    with pytest.raises(ConfigError, match=r"torch\.float32.*torch\.bfloat16"):
        engine.forward(sequence, helpers.random_prompt(10))


def test_bind_to_pools_of_another_model_raises(model_of: ModelOf) -> None:
    manager = helpers.make_manager(model_of("tiny-gemma3").spec)
    with pytest.raises(ConfigError, match=r"laid out for tiny-gemma3.*needs tiny-gpt-oss"):
        HfEngine(model_of("tiny-gpt-oss")).bind(manager)


def test_bind_twice_or_forward_before_bind_raises(model_of: ModelOf) -> None:
    engine, manager = helpers.bound_engine(model_of("llama"))
    with pytest.raises(LocalProtocolError):
        engine.bind(manager)
    sequence = helpers.open_sequence(manager, 10)
    with pytest.raises(LocalProtocolError):
        HfEngine(model_of("llama")).forward(sequence, helpers.random_prompt(10))
    with pytest.raises(LocalProtocolError):
        engine.forward(sequence, helpers.random_prompt(0))


def test_forward_without_pages_raises_before_the_model_runs(model_of: ModelOf) -> None:
    engine, manager = helpers.bound_engine(model_of("llama"))
    sequence = helpers.open_sequence(manager, 64)
    sequence.resize(capacity=32)
    with pytest.raises(InvariantError, match="need pages for blocks 0 to 1"):
        engine.forward(sequence, helpers.random_prompt(33))


@pytest.mark.parametrize("token", [-1, 384])
def test_forward_of_unknown_tokens_raises_and_leaves_the_pools_alone(model_of: ModelOf, token: int) -> None:
    engine, manager = helpers.bound_engine(model_of("llama"))
    sequence = helpers.open_sequence(manager, 10)
    sequence.resize(capacity=10)
    with pytest.raises(ConfigError, match="knows 0 to 383"):
        engine.forward(sequence, np.array([5, token]))
    assert not any(pool.any() for pool in manager.storage.pools)


def test_forward_beyond_the_longest_sequence_raises_with_the_numbers(model_of: ModelOf) -> None:
    model = model_of("llama")
    layout = build_layout(model.spec)
    engine, manager = helpers.bound_engine(model, KVCacheManager(layout, [200]))
    sequence = manager.create_sequence("long", (200,))
    sequence.resume()
    sequence.resize(capacity=4097, history=4090)
    with pytest.raises(ConfigError, match=r"reaches 4097 tokens.*stops at 4096"):
        engine.forward(sequence, helpers.random_prompt(4097))


def test_forward_without_a_new_token_raises(model_of: ModelOf) -> None:
    engine, manager = helpers.bound_engine(model_of("llama"))
    sequence = helpers.open_sequence(manager, 10)
    helpers.prefill(engine, sequence, helpers.random_prompt(10), 10)
    with pytest.raises(LocalProtocolError, match="with 10 tokens, 10 of them are history"):
        engine.forward(sequence, helpers.random_prompt(10))
