"""Going on from published pages and states gives the tokens of a cold run."""

from collections.abc import Callable

import numpy as np
import pytest

from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.hf import HfEngine
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.synthetic import SyntheticEngine
from tests.engines import helpers

ModelOf = Callable[[str], LoadedModel]

RECURRENT = ["tiny-qwen3-next", "tiny-nemotron-h", "tiny-falcon-h1", "tiny-bamba"]
ATTENTION = ["tiny-gpt-oss", "tiny-gemma3", "tiny-deepseek-v3"]
NEW_TOKENS = 24
CHUNK = 128


def warm(manager: KVCacheManager, prompt: helpers.Tokens) -> SequenceCache:
    sequence = manager.create_sequence("r", token_ids=prompt[:-1])
    sequence.resume()
    return sequence


def generate(engine: Engine, sequence: SequenceCache, prompt: helpers.Tokens) -> list[int]:
    """Prefill and decode as a worker that publishes what it computes, the state at the end of every chunk included."""
    for start in range(sequence.history, len(prompt), CHUNK):
        end = min(start + CHUNK, len(prompt))
        logits = helpers.step(engine, sequence, prompt[:end])
        sequence.commit(prompt[start:end], snapshot=True)
    tokens = helpers.decode_greedily(engine, sequence, prompt, int(logits.argmax()), NEW_TOKENS)
    sequence.commit(tokens[:-1])
    sequence.close()
    return tokens


def follow_up(shared: int, seed: int) -> helpers.Tokens:
    """The first tokens of the first prompt, and others after them."""
    return np.concatenate([helpers.random_prompt(700)[:shared], helpers.random_prompt(150, seed=seed)])


def bound(make_engine: Callable[[], Engine]) -> tuple[Engine, KVCacheManager]:
    engine = make_engine()
    manager = helpers.make_manager(engine.spec, 200)
    engine.bind(manager)
    return engine, manager


def check_reuse(make_engine: Callable[[], Engine], shared: int, reused: int) -> None:
    engine, manager = bound(make_engine)
    generate(engine, warm(manager, helpers.random_prompt(700)), helpers.random_prompt(700))
    prompt = follow_up(shared, seed=9)
    sequence = warm(manager, prompt)
    assert sequence.reused_tokens == sequence.history == reused
    tokens = generate(engine, sequence, prompt)
    manager.check_integrity()
    cold, empty = bound(make_engine)
    assert tokens == generate(cold, warm(empty, prompt), prompt)


@pytest.mark.parametrize("shared, reused", [(640, 640), (653, 653), (700, 700), (31, 31)])
@pytest.mark.parametrize("name", ATTENTION)
def test_published_pages_give_the_tokens_of_a_cold_run(model_of: ModelOf, name: str, shared: int, reused: int) -> None:
    check_reuse(lambda: HfEngine(model_of(name)), shared, reused)


@pytest.mark.parametrize("shared, reused", [(640, 640), (653, 640), (500, 384), (100, 0)])
@pytest.mark.parametrize("name", RECURRENT)
def test_published_states_give_the_tokens_of_a_cold_run(model_of: ModelOf, name: str, shared: int, reused: int) -> None:
    """Only where a state was published can a recurrent model go on: at the ends of chunks."""
    check_reuse(lambda: HfEngine(model_of(name)), shared, reused)


@pytest.mark.parametrize("name, reused", [("tiny-gpt-oss", 653), ("tiny-falcon-h1", 640)])
def test_synthetic_pages_and_states_verify_after_reuse(model_of: ModelOf, name: str, reused: int) -> None:
    check_reuse(lambda: SyntheticEngine(model_of(name).spec), 653, reused)


def test_conversation_goes_on_from_the_state_at_its_end(model_of: ModelOf) -> None:
    engine, manager = bound(lambda: HfEngine(model_of("tiny-qwen3-next")))
    first = helpers.random_prompt(300)
    answer = generate(engine, warm(manager, first), first)
    prompt = np.concatenate([first, answer, helpers.random_prompt(40, seed=3)])
    sequence = warm(manager, prompt)
    assert sequence.reused_tokens == 300 + NEW_TOKENS - 1
    tokens = generate(engine, sequence, prompt)
    cold, empty = bound(lambda: HfEngine(model_of("tiny-qwen3-next")))
    assert tokens == generate(cold, warm(empty, prompt), prompt)
