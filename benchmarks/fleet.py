"""Capacity: how many requests that decode at one length a manager holds at the same time, by asking it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.load import Load
from kvferry.cache.layout import CacheLayout, build_layout, build_static_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sequence import SequenceCache
from kvferry.cache.sizing import divide_quota, peak_slots, static_slots, step_weights
from kvferry.cache.spec import ModelSpec
from kvferry.cache.static_manager import StaticKVCacheManager


def pooled(spec: ModelSpec, load: Load, quota_bytes: int) -> int:
    """V2 pools, sized for this load."""
    layout = build_layout(spec, tokens_per_block=load.tokens_per_block)
    num_slots = divide_quota(layout, quota_bytes, step_weights(layout, load.steps))
    return fill(KVCacheManager(layout, num_slots, "meta"), layout, load)


def windowless(spec: ModelSpec, load: Load, quota_bytes: int) -> int:
    """One pool that takes every layer for full attention."""
    layers = tuple(replace(layer, window=None, sink_tokens=0) for layer in spec.layers)
    return pooled(replace(spec, layers=layers), load, quota_bytes)


def static_equal(spec: ModelSpec, load: Load, quota_bytes: int) -> int:
    """V1 pools with equal shares, as they are when nobody gives others."""
    return _static(spec, load, quota_bytes, None)


def static_best(spec: ModelSpec, load: Load, quota_bytes: int) -> int:
    """V1 pools with the best shares for this load: those in which all pools run out together."""
    layout = build_static_layout(spec, tokens_per_block=load.tokens_per_block)
    weights = step_weights(layout, load.steps)
    return _static(spec, load, quota_bytes, [weight / sum(weights) for weight in weights])


def _static(spec: ModelSpec, load: Load, quota_bytes: int, shares: Sequence[float] | None) -> int:
    layout = build_static_layout(spec, tokens_per_block=load.tokens_per_block)
    num_slots = static_slots(layout, quota_bytes, shares)
    return fill(StaticKVCacheManager(layout, num_slots, "meta"), layout, load)


def fill(manager: CacheManager, layout: CacheLayout, load: Load) -> int:
    """Admit requests until the manager refuses, then let all of them decode through a block.

    Raises:
        CapacityError: the manager had admitted more than it can serve.
    """
    peak = peak_slots(layout, load.steps)
    running: list[SequenceCache] = []
    while manager.can_admit(peak).admitted:
        sequence = manager.create_sequence(f"request-{len(running)}", peak)
        sequence.resume()
        sequence.resize(capacity=int(load.steps.capacity[0]), history=int(load.steps.history[0]))
        running.append(sequence)
    if running:
        _decode(manager, running, load)
    return len(running)


def _decode(manager: CacheManager, running: Sequence[SequenceCache], load: Load) -> None:
    for history, capacity in zip(load.steps.history, load.steps.capacity, strict=True):
        manager.resize_many(
            running,
            capacity=np.full(len(running), capacity, np.int64),
            history=np.full(len(running), history, np.int64),
        )
