import dataclasses
from typing import Any

import pytest

from kvferry.cache.spec import ModelSpec, StateSpec
from kvferry.transfer import compatibility
from kvferry.transfer.types import PROTOCOL_VERSION, Role
from tests.cache.specs import spec
from tests.transfer.tables import HYBRID, SCALED, page_table, rank_info


def fields(ours: Any, theirs: Any) -> list[str]:
    return [difference.field for difference in compatibility.check(ours, theirs)]


def test_equal_workers_may_pair_even_with_other_slot_counts() -> None:
    assert fields(rank_info(page_table(num_slots=4)), rank_info(page_table(num_slots=9))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"protocol_version": PROTOCOL_VERSION + 1},
        {"transport": "nixl"},
        {"model_digest": "other"},
        {"manager": "V1"},
        {"num_ranks": 2},
        {"rank": 1},
    ],
)
def test_each_differing_fact_is_named_with_both_values(change: dict[str, Any]) -> None:
    ours = rank_info(page_table())
    theirs = dataclasses.replace(ours, **change)
    [difference] = compatibility.check(ours, theirs)
    [(field, value)] = change.items()
    assert (difference.field, difference.remote) == (field, str(value))
    assert difference.local == str(getattr(ours, field))


@pytest.mark.parametrize(
    "ours, theirs, may_pair",
    [
        (Role.PREFILL, Role.DECODE, True),
        (Role.DECODE, Role.PREFILL, True),
        (Role.BOTH, Role.BOTH, True),
        (Role.BOTH, Role.DECODE, True),
        (Role.PREFILL, Role.PREFILL, False),
        (Role.DECODE, Role.DECODE, False),
    ],
)
def test_roles_must_complement_each_other(ours: Role, theirs: Role, may_pair: bool) -> None:
    table = page_table()
    differences = fields(rank_info(table, role=ours), rank_info(table, role=theirs))
    assert differences == ([] if may_pair else ["role"])


def test_all_geometry_differences_are_listed_at_once() -> None:
    ours = rank_info(page_table(spec([8, None])))
    theirs = rank_info(page_table(spec([8, 8, None]), tokens_per_block=8), model_digest="other")
    assert fields(ours, theirs) == ["model_digest", "tokens_per_block", "slot_bytes", "buffers"]


def test_other_windows_are_named() -> None:
    ours, theirs = (rank_info(page_table(spec([window, None]))) for window in (8, 16))
    [difference] = compatibility.check(ours, theirs)
    assert (difference.field, difference.local, difference.remote) == (
        "life_cycles",
        "window 8, full",
        "window 16, full",
    )


@pytest.mark.parametrize("ours, theirs", [(SCALED, spec([8, None])), (HYBRID, spec([8, None])), (SCALED, HYBRID)])
def test_layouts_with_other_pools_or_states_do_not_pair(ours: ModelSpec, theirs: ModelSpec) -> None:
    assert "slot_bytes" in fields(rank_info(page_table(ours)), rank_info(page_table(theirs)))


def test_recurrent_states_are_described() -> None:
    layer = HYBRID.layers[-1]
    wider = dataclasses.replace(layer, states=(StateSpec("conv_state", (4, 7), "float32"), layer.states[1]))
    theirs = dataclasses.replace(HYBRID, layers=(*HYBRID.layers[:-1], wider))
    found = compatibility.check(rank_info(page_table(HYBRID)), rank_info(page_table(theirs)))

    assert [difference.field for difference in found] == ["slot_bytes", "states"]
    assert found[1].local == "layers 2..2 (1) conv_state[4x6] float32 ssm_state[2x3x4] float32"
    assert found[1].remote == "layers 2..2 (1) conv_state[4x7] float32 ssm_state[2x3x4] float32"
    assert fields(rank_info(page_table(spec([8, None]))), rank_info(page_table(HYBRID)))[-1] == "states"


def test_life_cycles_name_the_recurrent_one() -> None:
    found = compatibility.check(rank_info(page_table(HYBRID)), rank_info(page_table(spec([8, None, None]))))

    assert (found[0].field, found[0].local) == ("life_cycles", "window 8, full, recurrent")


def test_slot_bytes_are_those_of_each_pool() -> None:
    found = compatibility.check(rank_info(page_table(SCALED)), rank_info(page_table(spec([8, None]))))

    assert ("slot_bytes", "512+32, 512+32") in [(difference.field, difference.local) for difference in found]


@pytest.mark.parametrize("part", ["pools", "num_pools", "buffers", "groups"])
def test_equal_digest_does_not_hide_other_slots(part: str) -> None:
    """The digest is a claim; what is copied follows the tables."""
    ours = page_table(SCALED)
    groups = list(ours.layer_groups)
    changes: dict[str, dict[str, Any]] = {
        "pools": {"pools": tuple(dataclasses.replace(pool, slot_bytes=pool.slot_bytes + 4) for pool in ours.pools)},
        "num_pools": {"layer_groups": (dataclasses.replace(groups[0], pools=groups[0].pools[:1]), *groups[1:])},
        "buffers": {"layer_groups": (dataclasses.replace(groups[0], buffers=groups[0].buffers[::-1]), *groups[1:])},
        "groups": {"layer_groups": tuple(groups[:1])},
    }
    theirs = dataclasses.replace(ours, **changes[part])

    assert theirs.layout_digest == ours.layout_digest
    assert set(fields(rank_info(ours), rank_info(theirs))) & {"slot_bytes", "buffers"}


def test_differences_that_no_field_shows_are_still_refused() -> None:
    ours = page_table()
    assert fields(rank_info(ours), rank_info(dataclasses.replace(ours, layout_digest="other"))) == ["layout_digest"]
