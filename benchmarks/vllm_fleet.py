"""Capacity of vLLM's hybrid allocator, by letting its manager admit requests."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

from benchmarks.load import Load
from benchmarks.vllm_side import RequestFactory, attention_spec, open_manager
from kvferry.cache.spec import LayerSpec, ModelSpec


def hybrid(spec: ModelSpec, load: Load, quota_bytes: int) -> int:
    """Requests that vLLM's manager admits; grouping of layers and number of blocks are vLLM's as well.

    Every request comes as on a decode worker: all tokens but the last are computed elsewhere, so only what its windows
    still need is allocated. It stands one token before its length, where a window straddles one block more than it
    fills: all requests can move through the block then.
    """
    manager = _manager(spec, load, quota_bytes)
    requests = RequestFactory(None)
    prompt = [0] * load.num_tokens
    count = 0
    while _admit(manager, requests.make(prompt), load.num_tokens - 2):
        count += 1
    return count


def _admit(manager: KVCacheManager, request: Any, num_computed: int) -> bool:
    blocks = manager.allocate_slots(request, 1, num_external_computed_tokens=num_computed, delay_cache_blocks=True)
    return blocks is not None


def _manager(spec: ModelSpec, load: Load, quota_bytes: int) -> KVCacheManager:
    config = VllmConfig()
    # A layer outside the blocks, as on GPUs; resolved by the engine otherwise. It does not change the block count.
    config.cache_config.kv_cache_layout = "LBHNC"
    groups = get_kv_cache_groups(config, {f"layer.{layer.layer_id}": _layer(layer, load) for layer in spec.layers})
    blocks = get_kv_cache_config_from_groups(config, groups, quota_bytes)
    return open_manager(blocks, tokens_per_block=load.tokens_per_block, caching=False)


def _layer(layer: LayerSpec, load: Load) -> Any:
    key = layer.buffers[0]
    return attention_spec(
        layer.window, tokens_per_block=load.tokens_per_block, num_heads=key.num_heads, head_dim=key.head_dim
    )
