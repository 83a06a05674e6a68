"""From a worker's configuration to its pools."""

from kvferry.cache.admission import PoolOptions
from kvferry.cache.layout import build_layout, build_static_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sizing import static_slots
from kvferry.cache.spec import ModelSpec
from kvferry.cache.static_manager import StaticKVCacheManager
from kvferry.cache.workload import Batch, Workload, size_pools
from kvferry.deploy.config import WorkerConfig


def build_manager(config: WorkerConfig, spec: ModelSpec, max_seq_len_tokens: int) -> CacheManager:
    """Pools of the configured kind, as large as the quota pays for.

    Raises:
        ConfigError: the quota is below what one sequence needs, the ratio does not fit, or the device lacks the memory.
    """
    pools = config.pools
    options = PoolOptions(
        commit_policy=pools.commit_policy,
        max_util_for_resume=pools.max_util_for_resume,
        max_sequences=pools.max_sequences,
        window_scratch=pools.window_scratch == "on",
    )
    if pools.manager == "V1":
        layout = build_static_layout(spec, tokens_per_block=pools.tokens_per_block, order=pools.slot_order)
        slots = static_slots(layout, pools.quota_bytes, pools.ratio)
        return StaticKVCacheManager(layout, slots, config.device, options=options)
    layout = build_layout(spec, tokens_per_block=pools.tokens_per_block, order=pools.slot_order)
    slots = size_pools(layout, pools.quota_bytes, workload(config, max_seq_len_tokens))
    return KVCacheManager(layout, slots, config.device, options=options)


def workload(config: WorkerConfig, max_seq_len_tokens: int) -> Workload:
    """What V2 pools are sized for: longest requests fill all groups together, and a chunk of a prompt always fits."""
    prefills = config.role.prefills
    lead = min(config.prefill_chunk_tokens, max_seq_len_tokens) if prefills else 1
    return Workload(
        ratio=config.pools.ratio,
        typical=Batch.of([(max_seq_len_tokens, max_seq_len_tokens - lead)]),
        prefill_tokens=lead if prefills else None,
        max_util_for_resume=config.pools.max_util_for_resume,
        max_rewind_tokens=0 if config.pools.window_scratch == "on" else None,
    )
