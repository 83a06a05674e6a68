import dataclasses
from typing import Any

import pytest

from kvferry.transfer import compatibility
from kvferry.transfer.types import Role
from tests.transfer.tables import manager, rank_info


def fields(ours: Any, theirs: Any) -> list[str]:
    return [difference.field for difference in compatibility.check(ours, theirs)]


def test_equal_workers_may_pair_even_with_other_slot_counts() -> None:
    assert fields(rank_info(manager(4).page_table()), rank_info(manager(9).page_table())) == []


@pytest.mark.parametrize(
    "change",
    [
        {"protocol_version": 2},
        {"transport": "nixl"},
        {"model_digest": "other"},
        {"num_ranks": 2},
        {"rank": 1},
    ],
)
def test_each_differing_fact_is_named_with_both_values(change: dict[str, Any]) -> None:
    ours = rank_info(manager().page_table())
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
    table = manager().page_table()
    differences = fields(rank_info(table, role=ours), rank_info(table, role=theirs))
    assert differences == ([] if may_pair else ["role"])


def test_all_geometry_differences_are_listed_at_once() -> None:
    ours = rank_info(manager(windows=[8, None]).page_table())
    theirs = rank_info(manager(windows=[8, 8, None], tokens_per_block=8).page_table(), model_digest="other")
    assert fields(ours, theirs) == ["model_digest", "tokens_per_block", "slot_bytes", "buffers"]


def test_other_windows_are_named() -> None:
    ours, theirs = (rank_info(manager(windows=[window, None]).page_table()) for window in (8, 16))
    [difference] = compatibility.check(ours, theirs)
    assert (difference.field, difference.local, difference.remote) == (
        "life_cycles",
        "window 8, full",
        "window 16, full",
    )
