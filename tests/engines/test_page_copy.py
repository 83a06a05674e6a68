"""Pages copied from one pool to another continue exactly, and only if every one of them is intact."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.transfer.engines.hf import HfEngine
from kvferry.transfer.engines.loaded_model import LoadedModel
from kvferry.transfer.engines.oracle import generate_in_one_process
from kvferry.transfer.engines.sampling import sample
from kvferry.transfer.inference import SamplingParams
from tests.engines import helpers

ModelOf = Callable[[str], LoadedModel]

NEW_TOKENS = 32
WINDOWED = ["tiny-gpt-oss", "tiny-gemma3"]
RECURRENT = ["tiny-qwen3-next", "tiny-nemotron-h", "tiny-falcon-h1", "tiny-bamba"]
TINY = [*WINDOWED, *RECURRENT, "tiny-deepseek-v3"]


class Pair:
    """A prefill side that computed a prompt, and a decode side whose slots carry other numbers."""

    def __init__(self, model: LoadedModel, prompt_tokens: int, chunk_tokens: int = 256) -> None:
        self.model = model
        self.prompt = helpers.random_prompt(prompt_tokens, seed=prompt_tokens)
        engine, self.source = helpers.bound_engine(model)
        self.sent = helpers.open_sequence(self.source, prompt_tokens, chunk_tokens=chunk_tokens)
        self.first = int(helpers.prefill(engine, self.sent, self.prompt, chunk_tokens)[-1].argmax())
        self.engine, self.target = helpers.bound_engine(model, helpers.make_manager(model.spec, 170))
        self._bystander = helpers.receive(self.target, 70, name="takes the first slots")
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        self.oracle = list(generate_in_one_process(model, self.prompt.tolist(), sampling, chunk_tokens).token_ids)

    def receive(self) -> tuple[SequenceCache, list[tuple[int, int, int]]]:
        received = helpers.receive(self.target, len(self.prompt))
        return received, helpers.copy_pages(self.source, self.sent, self.target, received)

    def tokens_after(self, damage: Callable[[KVCacheManager, list[tuple[int, int, int]]], None]) -> list[int]:
        received, moved = self.receive()
        damage(self.target, moved)
        tokens = helpers.decode_greedily(self.engine, received, self.prompt, self.first, NEW_TOKENS)
        received.close()
        return tokens


def damage_nothing(manager: KVCacheManager, moved: list[tuple[int, int, int]]) -> None:
    del manager, moved


AROUND_BLOCKS = [1, 31, 32, 33, 160, 1500]
AROUND_WINDOWS = [*AROUND_BLOCKS, 127, 128, 129, 159, 511, 512, 513, 543, 544, 545]
LENGTHS = [(name, length) for name in TINY for length in (AROUND_WINDOWS if name in WINDOWED else AROUND_BLOCKS)]


@pytest.mark.parametrize("name, length", LENGTHS)
def test_decode_from_copied_pages_gives_the_tokens_of_one_process(model_of: ModelOf, name: str, length: int) -> None:
    pair = Pair(model_of(name), length)
    assert pair.tokens_after(damage_nothing) == pair.oracle
    pair.target.check_integrity()


@pytest.mark.parametrize("name", TINY)
def test_zeroing_any_one_page_changes_the_tokens(model_of: ModelOf, name: str) -> None:
    """Every page that stays inside its window for all steps counts; the one about to leave is tested by its logits."""
    pair = Pair(model_of(name), 1500)
    received, moved = pair.receive()
    received.close()
    oldest = {group: min(block for g, block, _ in moved if g == group) for group, _, _ in moved}
    windowed = {int(g.id) for g in pair.target.layout.life_cycles if g.life_cycle.window is not None}
    leaving = {(group, oldest[group]) for group in windowed}
    indices = [index for index, (group, block, _) in enumerate(moved) if (group, block) not in leaving]
    silent = [moved[index][:2] for index in indices[::4] if pair.tokens_after(_zero(index)) == pair.oracle]
    assert not silent, f"zeroing these (life cycle, block) went unnoticed: {silent}"


@pytest.mark.parametrize("name", TINY)
def test_zeroing_any_one_page_changes_the_next_logits(model_of: ModelOf, name: str) -> None:
    """Including the page that is about to leave its window, which is the first of the list."""
    pair = Pair(model_of(name), 1500)
    tokens = np.append(pair.prompt, pair.first)
    received, moved = pair.receive()
    intact = helpers.step(pair.engine, received, tokens)
    received.close()
    for index in range(0, len(moved), 2):
        received, _ = pair.receive()
        _zero(index)(pair.target, moved)
        assert not torch.equal(helpers.step(pair.engine, received, tokens), intact), moved[index]
        received.close()


@pytest.mark.parametrize("name", WINDOWED)
def test_altering_one_token_inside_the_window_changes_the_tokens(model_of: ModelOf, name: str) -> None:
    pair = Pair(model_of(name), 1500)
    positions = [1499 - back for back in range(0, 64, 8)]
    noticed = [pair.tokens_after(_overwrite(position)) != pair.oracle for position in positions]
    assert sum(noticed) >= 6, dict(zip(positions, noticed, strict=True))


def test_decode_never_recomputes_the_prompt(model_of: ModelOf) -> None:
    """The decode side sees one token per step and writes no byte of the prompt's pages but the last block's."""
    pair = Pair(model_of("tiny-gpt-oss"), 256)
    received, moved = pair.receive()
    before = [helpers.slot_bytes(pair.target, 0)[slot].clone() for _, _, slot in moved]
    helpers.step(pair.engine, received, np.append(pair.prompt, pair.first))
    after = [helpers.slot_bytes(pair.target, 0)[slot] for _, _, slot in moved]
    assert all(torch.equal(*sides) for sides in zip(before, after, strict=True))


def test_seeded_sampling_from_copied_pages_gives_the_tokens_of_one_process(model_of: ModelOf) -> None:
    pair = Pair(model_of("tiny-gpt-oss"), 300)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.9, seed=7, ignore_eos=True)
    wanted = generate_in_one_process(pair.model, pair.prompt.tolist(), sampling, 256)
    received, _ = pair.receive()
    tokens, logprobs = list(wanted.token_ids[:1]), list(wanted.logprobs[:1])
    while len(tokens) < NEW_TOKENS:
        logits = helpers.step(pair.engine, received, np.append(pair.prompt, tokens))
        token, logprob = sample(logits, sampling, len(pair.prompt) + len(tokens))
        tokens.append(token)
        logprobs.append(logprob)
    assert (tuple(tokens), tuple(logprobs)) == wanted


def _zero(index: int) -> Callable[[KVCacheManager, list[tuple[int, int, int]]], None]:
    def damage(manager: KVCacheManager, moved: list[tuple[int, int, int]]) -> None:
        group, _, slot = moved[index]
        helpers.slot_bytes(manager, manager.layout.life_cycles[group].pool_group)[slot] = 0

    return damage


def _overwrite(position: int) -> Callable[[KVCacheManager, list[tuple[int, int, int]]], None]:
    """Give one token, in every windowed layer, the keys and values of its neighbour in the block."""

    def damage(manager: KVCacheManager, moved: list[tuple[int, int, int]]) -> None:
        for layer in (g for g in manager.layout.life_cycles if g.life_cycle.window is not None):
            slot = next(slot for group, block, slot in moved if (group, block) == (layer.id, position // 32))
            for view in layer.buffers:
                page = manager.buffer(view.layer_id, view.role)[slot]
                page[:, position % 32] = page[:, (position + 3) % 32 if (position | 31) < 1500 else position % 8]

    return damage


def test_engines_of_the_same_model_agree_on_its_digest(model_of: ModelOf) -> None:
    assert HfEngine(model_of("tiny-gpt-oss")).model_digest != HfEngine(model_of("tiny-gemma3")).model_digest
