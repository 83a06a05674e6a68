"""The V1 manager: same protocol, pools of its own per window, whole blocks only."""

import pytest

from kvferry.cache.admission import CommitPolicy, PoolOptions
from kvferry.cache.errors import ConfigError
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.layout import build_static_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.protocol import CacheManager
from kvferry.cache.sizing import static_slots
from kvferry.cache.spec import LayerSpec
from kvferry.cache.static_manager import StaticKVCacheManager
from tests.cache.serving import free, present, publish, published_pages, serve, started
from tests.cache.specs import attention, model, recurrent, spec

TOKENS = list(range(24))


def static(*layers: LayerSpec, slots: int = 32, **options: object) -> StaticKVCacheManager:
    layout = build_static_layout(model(*layers), tokens_per_block=4)
    return StaticKVCacheManager(layout, [slots] * len(layout.pool_groups), options=PoolOptions(**options))


def test_v1_and_v2_keep_the_same_protocol() -> None:
    managers: list[CacheManager] = [static(attention()), KVCacheManager(static(attention()).layout, [4])]
    assert [manager.version for manager in managers] == ["V1", "V2"]


def test_windows_with_equal_slots_do_not_share_a_pool() -> None:
    manager = static(attention(), attention(8))
    assert len(manager.layout.pool_groups) == 2
    started(manager).resize(capacity=16)
    assert free(manager) == [28, 28]


def test_static_shares_size_the_pools() -> None:
    layout = build_static_layout(model(attention(), attention(8)), tokens_per_block=4)
    slot = layout.pool_groups[0].slot_bytes
    manager = StaticKVCacheManager(layout, static_slots(layout, 40 * slot, [0.75, 0.25]))
    assert [usage.num_slots for usage in manager.usage()] == [30, 10]


@pytest.mark.parametrize("asked, reused", [(24, 24), (23, 20), (10, 8), (3, 0)])
def test_only_whole_blocks_are_reused(asked: int, reused: int) -> None:
    manager = static(attention())
    publish(manager, TOKENS)
    assert manager.probe(TOKENS[:asked]) == reused
    assert manager.create_sequence("s", token_ids=TOKENS[:asked]).borrowed == ()


def test_partial_last_block_is_not_published() -> None:
    manager = static(attention())
    publish(manager, TOKENS[:10])
    assert (manager.probe(TOKENS[:10]), manager.usage()[0].cached) == (8, 2)


def test_block_without_its_window_page_is_not_reused_although_the_window_would_not_read_it() -> None:
    manager = static(attention(), attention(6))
    publish(manager, TOKENS)
    nodes = manager.published.tree.find(manager.block_keys(TOKENS))
    manager.published.evict(1, manager.published.tree.pages[nodes[[1]], 1])
    assert published_pages(manager, TOKENS, 0) == [4] * 6
    assert manager.probe(TOKENS) == 4
    manager.check_integrity()


def test_out_of_window_pages_are_released() -> None:
    manager = static(attention(), attention(6))
    sequence = serve(manager, TOKENS)
    assert (present(sequence, LifeCycleId(0)), present(sequence, LifeCycleId(1))) == ([0, 1, 2, 3, 4, 5], [4, 5])


def test_sequence_with_a_recurrent_state_reuses_nothing() -> None:
    manager = static(attention(), recurrent(2, 3))
    publish(manager, TOKENS)
    assert manager.probe(TOKENS) == 0
    assert manager.create_sequence("s", token_ids=TOKENS, for_transfer=True).reused_tokens == 24


def test_recurrent_states_are_not_published() -> None:
    manager = static(attention(), recurrent(2, 3))
    publish(manager, TOKENS)
    assert manager.usage()[1].cached == 0


@pytest.mark.parametrize("policy", ["per_request", "per_conversation"])
def test_policies_that_keep_no_page_outside_the_window_are_refused(policy: CommitPolicy) -> None:
    layout = build_static_layout(spec([8, None]), tokens_per_block=4)
    with pytest.raises(ConfigError, match=rf"commit_policy {policy} .* \(window 8\): use all_reusable"):
        StaticKVCacheManager(layout, [8, 8], options=PoolOptions(commit_policy=policy))
    full = build_static_layout(spec([None]), tokens_per_block=4)
    assert StaticKVCacheManager(full, [8], options=PoolOptions(commit_policy=policy)).version == "V1"


def test_prefix_in_constant_use_keeps_all_its_window_pages() -> None:
    layout = build_static_layout(spec([8, None]), tokens_per_block=4)
    manager = StaticKVCacheManager(layout, [60, 60])
    hot = list(range(1, 41))
    found = []
    for index in range(16):
        tokens = [*hot, *[1000 + index] * 4]
        sequence = serve(manager, tokens, chunk=8)
        found.append(sequence.reused_tokens)
        sequence.close()
        publish(manager, range(5000 + 50 * index, 5020 + 50 * index), chunk=8)
    assert found == [0] + [40] * 15
