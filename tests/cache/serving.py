"""Sequences served in few words, for tests of managers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.cache.admission import CommitPolicy, PoolOptions
from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.layout import build_layout
from kvferry.cache.manager import NO_SCOPE, KVCacheManager
from kvferry.cache.sequence import DEFAULT_PRIORITY, Priority, SequenceCache
from kvferry.cache.spec import LayerSpec
from tests.cache.specs import model


def manager_of(
    *layers: LayerSpec,
    slots: int = 32,
    tokens_per_block: int = 4,
    policy: CommitPolicy = "all_reusable",
    **options: Any,
) -> KVCacheManager:
    """A V2 manager with so many slots in every pool group."""
    layout = build_layout(model(*layers), tokens_per_block=tokens_per_block)
    return KVCacheManager(
        layout, [slots] * len(layout.pool_groups), options=PoolOptions(commit_policy=policy, **options)
    )


def started(
    manager: KVCacheManager,
    tokens: Sequence[int] = (),
    *,
    scope: ReuseScope = NO_SCOPE,
    priority: Priority = DEFAULT_PRIORITY,
) -> SequenceCache:
    """An active sequence that reuses what is there of `tokens`."""
    sequence = manager.create_sequence("s", token_ids=tokens, scope=scope, priority=priority)
    sequence.resume()
    return sequence


def serve(
    manager: KVCacheManager,
    tokens: Sequence[int],
    *,
    chunk: int = 0,
    scope: ReuseScope = NO_SCOPE,
    priority: Priority = DEFAULT_PRIORITY,
) -> SequenceCache:
    """A sequence that has computed and committed all of `tokens`, still open and still committing."""
    sequence = started(manager, tokens[:-1], scope=scope, priority=priority)
    while sequence.committed < len(tokens):
        end = min(len(tokens), sequence.committed + (chunk or len(tokens)))
        sequence.resize(capacity=end)
        sequence.commit(tokens[sequence.committed : end])
    manager.check_integrity()
    return sequence


def publish(manager: KVCacheManager, tokens: Sequence[int], **how: Any) -> None:
    """Leave `tokens` in the cache: a sequence computes, commits and closes."""
    serve(manager, tokens, **how).close()
    manager.check_integrity()


def free(manager: KVCacheManager) -> list[int]:
    return [usage.free for usage in manager.usage()]


def present(sequence: SequenceCache, life_cycle: int) -> list[int]:
    """Ordinals of the blocks that have a page."""
    return np.flatnonzero(sequence.slots(LifeCycleId(life_cycle)) >= 0).tolist()


def published_pages(manager: KVCacheManager, tokens: Sequence[int], life_cycle: int) -> list[int]:
    """Tokens that the published page of each full block of `tokens` holds; 0 where there is none."""
    nodes = manager.published.tree.find(manager.block_keys(tokens))
    slots = manager.published.tree.pages[nodes, life_cycle]
    group = manager.layout.life_cycles[life_cycle].pool_group
    return manager.allocators[group].coverage(slots).tolist()


def books(manager: KVCacheManager, *prompts: list[int]) -> list[object]:
    """All that a failing call must leave alone."""
    found: list[object] = [
        manager.usage(),
        manager.unpromised(),
        len(manager.published.tree),
        sorted(manager.holds.open),
    ]
    for sequence in sorted(manager.sequences, key=lambda s: s.request_id):
        found += [sequence.state, sequence.committed, sequence.history, sequence.capacity, sequence.row]
        found += [sequence.slots(group.id).tolist() for group in manager.layout.life_cycles]
    return found + [manager.probe(prompt) for prompt in prompts]
