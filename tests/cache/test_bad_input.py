"""Calls that cannot be: refused with the numbers, and nothing has changed."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.cache.admission import PoolOptions
from kvferry.cache.block_keys import ReuseScope
from kvferry.cache.errors import CapacityError, ConfigError, LocalProtocolError
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.reservation import reserved_slots
from kvferry.cache.sequence import SequenceCache
from tests.cache.serving import books, free, manager_of, started
from tests.cache.specs import attention

FULL = LifeCycleId(0)
TOKENS = list(range(24))


def running() -> tuple[KVCacheManager, SequenceCache]:
    manager = manager_of(attention(), attention(6))
    sequence = started(manager)
    sequence.resize(capacity=12, history=8)
    sequence.commit(TOKENS[:6])
    return manager, sequence


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda s: s.resize(history=7), ConfigError, "history 8 cannot decrease to 7"),
        (lambda s: s.resize(capacity=7), ConfigError, "capacity 7 is below history 8"),
        (lambda s: s.resize(history=13), ConfigError, "capacity 12 is below history 13"),
        (lambda s: s.resize(capacity=-4), ConfigError, "capacity is -4"),
        (lambda s: s.resize(capacity=4000), CapacityError, "new slots per pool group"),
        (lambda s: s.commit([1] * 7), ConfigError, "commit of 7 tokens, but 6 are committed and capacity is 12"),
        (lambda s: s.commit([-1]), ConfigError, "token ids -1"),
        (lambda s: s.commit([1 << 31]), ConfigError, "2147483647"),
        (lambda s: s.commit([1.5]), ConfigError, "integers"),
        (lambda s: s.resume(), LocalProtocolError, "is active, it must be suspended"),
    ],
)
def test_call_with_wrong_cursors_or_tokens_is_refused(
    call: Callable[[SequenceCache], None], error: type[Exception], message: str
) -> None:
    manager, sequence = running()
    before = books(manager, TOKENS)
    with pytest.raises(error, match=message):
        call(sequence)
    assert books(manager, TOKENS) == before
    manager.check_integrity()


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.resize(capacity=16),
        lambda s: s.commit([6]),
        lambda s: s.pages(4),
        lambda s: s.page_indices(FULL, 0),
        lambda s: s.suspend(),
    ],
    ids=["resize", "commit", "pages", "page_indices", "suspend"],
)
def test_suspended_sequence_refuses_what_needs_its_row(call: Callable[[SequenceCache], None]) -> None:
    manager, sequence = running()
    sequence.suspend()
    before = books(manager, TOKENS)
    with pytest.raises(LocalProtocolError, match="is suspended, it must be active"):
        call(sequence)
    assert books(manager, TOKENS) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.resize(capacity=4),
        lambda s: s.commit([1]),
        lambda s: s.pages(1),
        lambda s: s.resume(),
        lambda s: s.suspend(),
        lambda s: s.stop_committing(),
        lambda s: s.plan_drop(),
    ],
    ids=["resize", "commit", "pages", "resume", "suspend", "stop_committing", "plan_drop"],
)
def test_closed_sequence_refuses_every_call(call: Callable[[SequenceCache], None]) -> None:
    manager, sequence = running()
    sequence.close()
    before = books(manager, TOKENS)
    with pytest.raises(LocalProtocolError, match="closed"):
        call(sequence)
    assert books(manager, TOKENS) == before


def test_step_with_a_sequence_that_is_not_active_is_refused() -> None:
    """16 active sequences fill all rows: the missing row of a suspended one must not be taken for the last of them."""
    manager = manager_of(attention())
    active = [started(manager) for _ in range(16)]
    suspended = manager.create_sequence("z")
    before = books(manager)
    for wrong in (suspended, active[0]):
        with pytest.raises(LocalProtocolError):
            manager.resize_many([active[0], wrong], capacity=np.array([4, 4]))
    assert books(manager) == before


@pytest.mark.parametrize("row", [-1, 3, 1000])
def test_rows_of_no_sequence_are_refused(row: int) -> None:
    manager, _ = running()
    with pytest.raises(LocalProtocolError, match=rf"rows \[{row}\] have no active sequence"):
        manager.resize_rows(np.array([row]), capacity=np.array([4]))


@pytest.mark.parametrize("capacity", [[16], [16, 16, 16], [[16, 16]]])
def test_step_with_another_number_of_cursors_is_refused(capacity: list[Any]) -> None:
    manager = manager_of(attention())
    sequences = [started(manager) for _ in range(2)]
    with pytest.raises(ConfigError, match="one of each per sequence"):
        manager.resize_many(sequences, capacity=np.array(capacity))
    assert free(manager) == [32]


@pytest.mark.parametrize(
    "wanted, message",
    [
        ({"token_ids": [-3]}, "token ids"),
        ({"token_ids": np.array([1 << 31], np.uint32)}, "token ids"),
        ({"token_ids": [0.5]}, "integers"),
        ({"priority": 101}, "priority is 101"),
        ({"priority": -1}, "priority is -1"),
        ({"reserve": (1, 1, 1)}, "one per pool group"),
        ({"beam_width": 2}, "one beam"),
    ],
)
def test_sequence_that_cannot_be_is_refused(wanted: dict[str, Any], message: str) -> None:
    manager, _ = running()
    before = books(manager, TOKENS)
    with pytest.raises(ConfigError, match=message):
        manager.create_sequence("b", **wanted)
    assert books(manager, TOKENS) == before


def test_priority_function_that_answers_nonsense_makes_the_commit_fail_and_changes_nothing() -> None:
    manager = manager_of(attention())
    sequence = started(manager, priority=lambda ordinal, life_cycle: 1000 * ordinal)
    sequence.resize(capacity=8)
    before = books(manager, TOKENS)
    with pytest.raises(ConfigError, match="priority is 1000"):
        sequence.commit(TOKENS[:8])
    assert books(manager, TOKENS)[4:] == before[4:]
    manager.check_integrity()


def test_scopes_of_more_than_64_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="64 bits"):
        manager_of(attention()).create_sequence("a", scope=ReuseScope(salt=1 << 64))


@pytest.mark.parametrize("capacity", [42.5, math.nan, -4, 2**40, 2**70, "5"])
def test_capacity_that_is_no_number_of_tokens_is_refused(capacity: Any) -> None:
    sequence = started(manager_of(attention()))
    sequence.resize(capacity=8)
    with pytest.raises(ConfigError, match="capacity is "):
        sequence.resize(capacity=capacity)
    assert sequence.capacity == 8


@pytest.mark.parametrize("slots", [(1.5,), (-1,), ("1",), (1, 1)])
def test_slots_that_are_no_counts_are_refused(slots: Any) -> None:
    manager = manager_of(attention())
    for ask in (manager.fits_ever, manager.can_admit, lambda slots: manager.create_sequence("s", slots)):
        with pytest.raises(ConfigError, match="slots"):
            ask(slots)
    assert not manager.sequences


@pytest.mark.parametrize("option", [{"window_scratch": "off"}, {"max_sequences": 1.5}, {"max_rewind_tokens": "3"}])
def test_options_of_another_type_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        PoolOptions(**option)


def test_reservation_for_no_number_of_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="total_tokens is -5"):
        reserved_slots(manager_of(attention()).layout, -5, 1)
