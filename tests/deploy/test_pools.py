"""From a worker's configuration to its manager: kind, layout, sizes and what is refused."""

import math
from typing import Any

import pytest

from kvferry.cache.admission import PoolOptions
from kvferry.cache.errors import ConfigError
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.reservation import reserved_slots
from kvferry.cache.static_manager import StaticKVCacheManager
from kvferry.deploy.config import WorkerConfig
from kvferry.deploy.pools import build_manager
from tests.cache.specs import attention, model, recurrent, spec

MIB = 1 << 20
MAX_TOKENS = 4096
WINDOW = 128
# Two layers of each kind; the window's layers have half the heads, so V2 has two pool groups as well.
TWO_SIZES = model(attention(WINDOW, heads=1), attention(), attention(WINDOW, heads=1), attention())
ONE_SIZE = spec([WINDOW, None, WINDOW, None])


def config_of(role: str = "both", chunk_tokens: int = 512, **pools: Any) -> WorkerConfig:
    values = {"role": role, "directory": "127.0.0.1:1", "prefill_chunk_tokens": chunk_tokens}
    return WorkerConfig.model_validate({**values, "pools": {"quota_bytes": 8 * MIB, **pools}})


def spent_bytes(manager: KVCacheManager) -> list[int]:
    return [
        count * group.slot_bytes
        for count, group in zip(manager.storage.num_slots, manager.layout.pool_groups, strict=True)
    ]


def life_cycles(manager: KVCacheManager) -> list[list[str]]:
    layout = manager.layout
    return [[str(layout.life_cycles[lc].life_cycle) for lc in group.life_cycles] for group in layout.pool_groups]


def built(config: WorkerConfig, what: Any = ONE_SIZE) -> KVCacheManager:
    manager = build_manager(config, what, MAX_TOKENS)
    assert isinstance(manager, KVCacheManager)
    return manager


@pytest.mark.parametrize(
    "name, kind, groups",
    [
        ("V2", KVCacheManager, [["window 128", "full"]]),
        ("v1", StaticKVCacheManager, [["window 128"], ["full"]]),
    ],
)
def test_manager_is_of_the_configured_kind(name: str, kind: type[KVCacheManager], groups: list[list[str]]) -> None:
    manager = built(config_of(manager=name))
    assert type(manager) is kind
    assert manager.version == name.upper()
    assert life_cycles(manager) == groups


@pytest.mark.parametrize("manager", ["V1", "V2"])
def test_quota_is_spent_and_not_overspent(manager: str) -> None:
    pools = built(config_of(manager=manager), TWO_SIZES)
    assert 8 * MIB - sum(group.slot_bytes for group in pools.layout.pool_groups) <= sum(spent_bytes(pools)) <= 8 * MIB


@pytest.mark.parametrize("manager", ["V1", "V2"])
def test_ratio_is_the_share_of_every_pool(manager: str) -> None:
    pools = built(config_of(manager=manager, ratio="0.25,0.75"), TWO_SIZES)
    first, second = spent_bytes(pools)
    assert first / (first + second) == pytest.approx(0.25, abs=0.001)


def test_v1_without_ratio_takes_equal_shares() -> None:
    first, second = spent_bytes(built(config_of(manager="V1"), TWO_SIZES))
    assert first / second == pytest.approx(1.0, abs=0.01)


def test_v2_without_ratio_is_sized_for_the_longest_request() -> None:
    pools = built(config_of(role="decode"), TWO_SIZES)
    need = reserved_slots(pools.layout, MAX_TOKENS, 1)
    requests = [count / slots for count, slots in zip(pools.storage.num_slots, need, strict=True)]
    # Both groups hold the same number of longest requests; the window's may straddle one block more.
    assert requests[0] == pytest.approx(requests[1], rel=0.25)


@pytest.mark.parametrize("manager", ["V1", "V2"])
def test_options_reach_the_manager(manager: str) -> None:
    given = {
        "commit_policy": "off",
        "max_util_for_resume": 0.5,
        "max_sequences": 7,
        "window_scratch": "on",
    }
    wanted = PoolOptions(commit_policy="off", max_util_for_resume=0.5, max_sequences=7, window_scratch=True)
    assert built(config_of(manager=manager, **given)).options == wanted
    assert built(config_of(manager=manager)).options == PoolOptions()


@pytest.mark.parametrize("manager", ["V1", "V2"])
@pytest.mark.parametrize(
    "ratio, story",
    [
        ("1", r"\[1\.0\]: need 2 positive numbers"),
        ("0.2,0.3,0.5", r"\[0\.2, 0\.3, 0\.5\]: need 2 positive numbers"),
        ("0.5,0.4", r"0\.9"),
        ("0.7,0.7", r"1\.4"),
    ],
)
def test_ratio_that_does_not_fit_is_refused_with_the_numbers(manager: str, ratio: str, story: str) -> None:
    with pytest.raises(ConfigError, match=story) as refused:
        build_manager(config_of(manager=manager, ratio=ratio), TWO_SIZES, MAX_TOKENS)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("manager", ["V1", "V2"])
def test_quota_below_what_one_sequence_needs_is_refused_with_the_numbers(manager: str) -> None:
    with pytest.raises(ConfigError, match="4096 bytes"):
        build_manager(config_of(manager=manager, quota_bytes=4096), ONE_SIZE, MAX_TOKENS)


def smallest_quota(role: str, chunk_tokens: int, **pools: Any) -> int:
    """The least MiB, to a sixteenth, that V2 pools can be built with."""
    for sixteenths in range(1, 256):
        try:
            built(config_of(role, chunk_tokens, quota_bytes=sixteenths * MIB // 16, **pools))
        except ConfigError:
            continue
        return sixteenths
    return math.inf  # type: ignore[return-value]


def test_a_prefill_worker_needs_room_for_a_chunk_and_less_with_scratch_pages() -> None:
    plain = smallest_quota("prefill", 2048)
    assert smallest_quota("prefill", 2048, window_scratch="on") < plain
    assert smallest_quota("decode", 2048) < plain
    assert smallest_quota("prefill", 32) < plain


@pytest.mark.parametrize("manager", ["V1", "V2"])
def test_any_chunk_of_a_fresh_pool_fits(manager: str) -> None:
    """What the worker was sized for can be admitted, to the last token of the longest request that fits."""
    pools = built(config_of(manager=manager, quota_bytes=64 * MIB), TWO_SIZES)
    assert pools.fits_ever(reserved_slots(pools.layout, MAX_TOKENS, 512)).admitted


@pytest.mark.parametrize("manager", ["V1", "V2"])
def test_recurrent_layers_have_a_pool_of_states(manager: str) -> None:
    pools = built(config_of(manager=manager), model(recurrent(4, 16), attention()))
    assert sorted(map(tuple, life_cycles(pools))) == [("full",), ("recurrent",)]
    assert min(pools.storage.num_slots) >= 1


def test_slot_order_is_that_of_the_configuration() -> None:
    assert built(config_of(slot_order="head_major")).layout.order == "head_major"
    with pytest.raises(ConfigError, match="layer_major"):
        built(config_of(slot_order="head_major", window_scratch="on"))
