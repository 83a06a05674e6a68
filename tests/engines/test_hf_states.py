"""Recurrent states in the pools: read when there is a history, never before, and written once a pass has succeeded."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvferry.cache.errors import ConfigError, InvariantError
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.spec import LayerSpec, ModelSpec, StateSpec
from kvferry.transfer.engines.hf import HfEngine
from kvferry.transfer.engines.hf_cache import CacheViews, PooledCache
from kvferry.transfer.engines.loaded_model import LoadedModel
from tests.engines import helpers

ModelOf = Callable[[str], LoadedModel]

RECURRENT = ["tiny-qwen3-next", "tiny-nemotron-h", "tiny-falcon-h1", "tiny-bamba"]
NEW_TOKENS = 32


class Prompt:
    """A prompt computed in chunks, and the state after it, which can be damaged and restored."""

    def __init__(self, model: LoadedModel, num_tokens: int = 1500) -> None:
        self.engine, self.manager = helpers.bound_engine(model)
        self.tokens = helpers.random_prompt(num_tokens, seed=num_tokens)
        self.sequence, self.first = self._computed(num_tokens)

    def _computed(self, num_tokens: int) -> tuple[SequenceCache, int]:
        sequence = helpers.open_sequence(self.manager, num_tokens)
        logits = helpers.prefill(self.engine, sequence, self.tokens[:num_tokens], 256)
        return sequence, int(logits[-1].argmax())

    def states(self) -> list[tuple[int, str]]:
        group = self.manager.layout.recurrent
        assert group is not None
        return [(int(view.layer_id), view.role) for view in group.states]

    def states_after(self, num_tokens: int) -> dict[tuple[int, str], torch.Tensor]:
        sequence, _ = self._computed(num_tokens)
        found = {state: self.manager.state(*state)[sequence.state_slot].clone() for state in self.states()}
        sequence.close()
        return found

    def tokens_with(self, damage: dict[tuple[int, str], torch.Tensor]) -> list[int]:
        """Decode from a copy of the sequence's pages in which some states are others."""
        pages = helpers.receive(self.manager, len(self.tokens), name="copy")
        helpers.copy_pages(self.manager, self.sequence, self.manager, pages)
        for (layer, role), state in damage.items():
            self.manager.state(layer, role)[pages.state_slot] = state
        tokens = helpers.decode_greedily(self.engine, pages, self.tokens, self.first, NEW_TOKENS)
        pages.close()
        return tokens


@pytest.mark.parametrize("name", RECURRENT)
def test_zeroing_any_one_state_changes_the_tokens(model_of: ModelOf, name: str) -> None:
    prompt = Prompt(model_of(name))
    intact = prompt.tokens_with({})
    silent = [state for state in prompt.states() if prompt.tokens_with({state: torch.zeros(())}) == intact]
    assert not silent, f"zeroing these (layer, role) went unnoticed: {silent}"


@pytest.mark.parametrize("back", [1, 32, 300])
@pytest.mark.parametrize("name", RECURRENT)
def test_states_of_an_earlier_position_change_the_tokens(model_of: ModelOf, name: str, back: int) -> None:
    prompt = Prompt(model_of(name))
    assert prompt.tokens_with(prompt.states_after(len(prompt.tokens) - back)) != prompt.tokens_with({})


@pytest.mark.parametrize("name", RECURRENT)
def test_first_pass_never_sees_what_the_slots_held(model_of: ModelOf, name: str) -> None:
    model = model_of(name)
    engine, manager = helpers.bound_engine(model)
    for pool in manager.storage.pools:
        pool.fill_(0xFF)  # not a number, in every dtype
    prompt = helpers.random_prompt(100)
    found = helpers.prefill(engine, helpers.open_sequence(manager, 100, chunk_tokens=30), prompt, 30)
    assert all(torch.equal(*pair) for pair in zip(helpers.reference_logits(model, prompt, 30, 0), found, strict=True))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 100])
@pytest.mark.parametrize("name", RECURRENT)
def test_prompt_in_chunks_gives_the_tokens_of_the_prompt_at_once(
    model_of: ModelOf, name: str, chunk_tokens: int
) -> None:
    """Chunks that begin anywhere go on from the state before them; only the order of summation differs."""
    engine, manager = helpers.bound_engine(model_of(name))
    prompt = helpers.random_prompt(150)
    logits, tokens = [], []
    for chunk in (len(prompt), chunk_tokens):
        sequence = helpers.open_sequence(manager, len(prompt), chunk_tokens=chunk)
        logits.append(helpers.prefill(engine, sequence, prompt, chunk)[-1])
        tokens.append(helpers.decode_greedily(engine, sequence, prompt, int(logits[-1].argmax()), NEW_TOKENS))
    assert torch.allclose(*logits, rtol=0.0, atol=1e-3)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", RECURRENT)
def test_pass_that_fails_leaves_the_states_as_they_were(model_of: ModelOf, name: str) -> None:
    prompt = Prompt(model_of(name), 100)
    group = prompt.manager.layout.recurrent
    assert group is not None
    before = helpers.slot_bytes(prompt.manager, group.pool_group)[prompt.sequence.state_slot].clone()

    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    hook = model_of(name).network.lm_head.register_forward_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="no more"):
            helpers.step(prompt.engine, prompt.sequence, np.append(prompt.tokens, prompt.first))
    finally:
        hook.remove()
    assert torch.equal(helpers.slot_bytes(prompt.manager, group.pool_group)[prompt.sequence.state_slot], before)


@pytest.mark.parametrize("name", RECURRENT)
def test_layers_of_the_cache_are_of_the_kinds_of_the_models_own(model_of: ModelOf, name: str) -> None:
    model = model_of(name)
    _, manager = helpers.bound_engine(model)
    sequence = helpers.open_sequence(manager, 10)
    sequence.resize(capacity=10)
    pooled, own = PooledCache(CacheViews(manager), sequence, 10), DynamicCache(config=model.network.config)
    kept = len(pooled.layers)  # layers at the end that cache nothing are not listed
    assert (pooled.is_linear, pooled.is_dummy) == (own.is_linear[:kept], own.is_dummy[:kept])
    assert all(own.is_dummy[kept:])
    assert not pooled.has_previous_state()
    assert pooled.get_seq_length() == own.get_seq_length() == 0


def test_sequence_without_a_state_raises_before_the_model_runs(model_of: ModelOf) -> None:
    engine, manager = helpers.bound_engine(model_of("tiny-qwen3-next"))
    sequence = helpers.open_sequence(manager, 10)
    with pytest.raises(InvariantError):
        engine.forward(sequence, helpers.random_prompt(10))


def _with_states(spec: ModelSpec, change: Callable[[StateSpec], StateSpec]) -> ModelSpec:
    layers = (
        LayerSpec(layer.layer_id, layer.window, layer.buffers, tuple(map(change, layer.states)))
        for layer in spec.layers
    )
    return ModelSpec(spec.name, spec.dtype, tuple(layers))


def _wider(state: StateSpec) -> StateSpec:
    return StateSpec(state.role, (state.shape[0] + 1, *state.shape[1:]), state.dtype)


def _half(state: StateSpec) -> StateSpec:
    return StateSpec(state.role, state.shape, "float16")


@pytest.mark.parametrize(
    "change, told",
    [
        (_wider, r"layer 0 convolution state: the model gives \[1, 128, 4\].*hold \[1, 129, 4\]"),
        (_half, r"torch\.float32, the pools hold \[1, 128, 4\] torch\.float16"),
    ],
)
def test_states_of_another_shape_or_dtype_than_the_pools_hold_are_refused(
    model_of: ModelOf, change: Callable[[StateSpec], StateSpec], told: str
) -> None:
    model = model_of("tiny-qwen3-next")
    spec = _with_states(model.spec, change)
    engine = HfEngine(LoadedModel("liar", model.network, model.tokenizer, spec, "digest"))
    manager = helpers.make_manager(spec)
    engine.bind(manager)
    sequence = helpers.open_sequence(manager, 10)
    sequence.resize(capacity=10)
    with pytest.raises(ConfigError, match=told):
        engine.forward(sequence, helpers.random_prompt(10))


def test_bind_to_layers_without_a_convolution_state_raises(model_of: ModelOf) -> None:
    model = model_of("tiny-qwen3-next")
    spec = _with_states(model.spec, lambda state: StateSpec(f"other_{state.role}", state.shape, state.dtype))
    manager: KVCacheManager = helpers.make_manager(spec)
    with pytest.raises(ConfigError, match="beside 'conv_state'"):
        HfEngine(LoadedModel("other", model.network, model.tokenizer, spec, "digest")).bind(manager)
