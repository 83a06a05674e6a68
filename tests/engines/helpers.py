"""Pools, sequences and copies that the engine tests share."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from kvferry.cache.layout import SlotOrder, build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.sizing import decode_steps, peak_slots, prefill_steps
from kvferry.cache.spec import ModelSpec
from kvferry.transfer.engines.base import Engine
from kvferry.transfer.engines.hf import HfEngine
from kvferry.transfer.engines.loaded_model import LoadedModel

Tokens = npt.NDArray[np.int64]


def random_prompt(length: int, seed: int = 0) -> Tokens:
    """Printable bytes as tokens of the byte tokenizer; they exist in every tiny model."""
    return np.random.default_rng(seed).integers(35, 129, length)


def make_manager(
    spec: ModelSpec, num_slots: int = 120, *, tokens_per_block: int = 32, order: SlotOrder = "layer_major"
) -> KVCacheManager:
    layout = build_layout(spec, tokens_per_block=tokens_per_block, order=order)
    return KVCacheManager(layout, [num_slots] * len(layout.pool_groups))


def bound_engine(model: LoadedModel, manager: KVCacheManager | None = None) -> tuple[HfEngine, KVCacheManager]:
    engine, manager = HfEngine(model), manager or make_manager(model.spec)
    engine.bind(manager)
    return engine, manager


def open_sequence(
    manager: KVCacheManager, prompt_tokens: int, *, new_tokens: int = 33, chunk_tokens: int = 256, name: str = "r"
) -> SequenceCache:
    steps = prefill_steps(prompt_tokens, chunk_tokens) + decode_steps(prompt_tokens, new_tokens)
    sequence = manager.create_sequence(name, peak_slots(manager.layout, steps))
    sequence.resume()
    return sequence


def step(engine: Engine, sequence: SequenceCache, tokens: Tokens) -> torch.Tensor:
    """One forward pass the way a worker does it, over the tokens that are not history yet.

    `tokens` are all of the sequence. Returns the logits after the last one.
    """
    sequence.resize(capacity=len(tokens))
    logits = engine.forward(sequence, tokens)
    sequence.resize(history=len(tokens))
    return logits


def prefill(engine: Engine, sequence: SequenceCache, prompt: Tokens, chunk_tokens: int) -> list[torch.Tensor]:
    """The logits after every chunk."""
    ends = [*range(sequence.history + chunk_tokens, len(prompt), chunk_tokens), len(prompt)]
    return [step(engine, sequence, prompt[:end]) for end in ends]


def decode_greedily(
    engine: Engine, sequence: SequenceCache, prompt: Tokens, first_token: int, num_tokens: int
) -> list[int]:
    """`num_tokens` tokens, the first one included."""
    tokens = [first_token]
    while len(tokens) < num_tokens:
        tokens.append(int(step(engine, sequence, np.append(prompt, tokens)).argmax()))
    return tokens


def chunks(prompt: Tokens, chunk_tokens: int) -> Iterator[Tokens]:
    return (prompt[start : start + chunk_tokens] for start in range(0, len(prompt), chunk_tokens))


def reference_logits(model: LoadedModel, prompt: Tokens, chunk_tokens: int, num_decode: int) -> list[torch.Tensor]:
    """Logits after every chunk and every greedy step, from transformers' own cache."""
    cache = DynamicCache(config=model.network.config)
    logits = [model.next_logits(torch.from_numpy(chunk), cache) for chunk in chunks(prompt, chunk_tokens)]
    for _ in range(num_decode):
        logits.append(model.next_logits(logits[-1].argmax()[None], cache))
    return logits


def receive(manager: KVCacheManager, prompt_tokens: int, *, name: str = "r") -> SequenceCache:
    """A decode side's sequence: pages for the prompt's live tokens, with the whole prompt as history."""
    sequence = open_sequence(manager, prompt_tokens, chunk_tokens=prompt_tokens, name=name)
    sequence.resize(history=prompt_tokens, capacity=prompt_tokens)
    return sequence


def copy_pages(
    source: KVCacheManager, sent: SequenceCache, target: KVCacheManager, received: SequenceCache
) -> list[tuple[int, int, int]]:
    """Copy whole slots position by position. Returns (life cycle, block, target slot) of every page moved."""
    moved = []
    for group in target.layout.life_cycles:
        pairs = zip(sent.slots(group.id), received.slots(group.id), strict=True)
        for block, (here, there) in enumerate(pairs):
            if here >= 0 and there >= 0:
                slot_bytes(target, group.pool_group)[there] = slot_bytes(source, group.pool_group)[here]
                moved.append((int(group.id), block, int(there)))
    return moved


def slot_bytes(manager: KVCacheManager, pool_group: int) -> torch.Tensor:
    """Shapes: [num_slots, slot_bytes], uint8, a view. Only of groups with one pool."""
    (pool,) = manager.storage.pool_indices(pool_group)
    return manager.storage.pools[pool].view(manager.storage.num_slots[pool_group], -1)
