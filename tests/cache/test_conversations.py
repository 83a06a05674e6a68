"""Turns of conversations: what is kept to go on from one goes when a later one has, and nothing else does."""

import contextlib
import itertools

import pytest

from kvferry.cache.errors import ConfigError
from kvferry.cache.manager import KVCacheManager
from tests.cache.serving import manager_of, publish, started
from tests.cache.specs import attention, recurrent

TURN = list(range(1, 19))
"""Ends within a block."""


def conversations(slots: int = 64) -> KVCacheManager:
    return manager_of(attention(), attention(4), slots=slots, policy="per_conversation")


def test_later_turn_ends_an_earlier_one() -> None:
    manager = conversations()
    publish(manager, TURN)
    publish(manager, [*TURN, *range(50, 60)])
    assert manager.probe([*TURN, 99]) < 18
    assert manager.probe([*TURN, *range(50, 60), 99]) == 28


def test_prompt_that_parts_within_the_last_block_of_a_turn_leaves_it() -> None:
    manager = conversations()
    publish(manager, TURN)
    publish(manager, [*TURN[:17], *range(70, 80)])
    assert manager.probe([*TURN, 99]) == 18


def test_sequence_that_never_ran_ends_no_turn() -> None:
    manager = conversations()
    turn = list(range(1, 17))
    longer = manager.create_sequence("longer", token_ids=[])
    longer.resume()
    publish(manager, turn)
    longer.resize(capacity=26)
    longer.commit([*turn, *range(50, 54)])
    waiting = manager.create_sequence("waiting", token_ids=[*turn, *range(50, 54), 7])
    assert waiting.reused_tokens == 20
    waiting.close()
    assert manager.probe([*turn, 99]) == 16
    longer.close()
    manager.check_integrity()


def test_books_of_turns_and_plans_stay_within_what_is_published() -> None:
    manager = manager_of(attention(), attention(40), slots=24, policy="per_conversation")
    for index in range(200):
        publish(manager, range(1000 * index, 1000 * index + 30))
    drops = manager.published.drops
    assert len(drops._notes) <= sum(usage.cached for usage in manager.usage())
    assert drops._noted_by_turns <= 4 * 24 * 2


def test_plans_that_the_caller_forgets_leave_nothing_once_the_pages_are_gone() -> None:
    manager = manager_of(attention(8), slots=8)
    for index in range(100):
        sequence = manager.create_sequence("s")
        sequence.resume()
        sequence.resize(capacity=8)
        sequence.commit([index] * 8)
        sequence.plan_drop()
        sequence.close()
    assert len(manager.published.drops._notes) <= 8
    manager.check_integrity()


@pytest.mark.parametrize("length", [16, 18])
def test_later_turn_ends_an_earlier_one_although_matches_fall_short(length: int) -> None:
    manager = manager_of(attention(), attention(6), slots=64, policy="per_conversation", match_backoff_tokens=1)
    turn = list(range(1, length + 1))
    publish(manager, turn)
    assert manager.probe([*turn, 99]) == length - 1
    publish(manager, [*turn, *range(50, 62)])
    assert manager.probe([*turn, 99]) < length - 1


def test_turns_that_note_no_page_are_not_kept() -> None:
    manager = manager_of(attention(), slots=8, policy="per_conversation")
    for index in range(100):
        publish(manager, range(100 * index, 100 * index + 6))
    assert not manager.published.drops._turns


def test_priority_function_that_fails_at_the_end_keeps_no_node_alive() -> None:
    manager = manager_of(attention(), recurrent(2, 3), slots=16)
    answers = itertools.chain([1, 1], itertools.cycle([101, 1]))  # for the states; fails for the snapshot itself
    sequence = started(manager, priority=lambda ordinal, life_cycle: next(answers) if life_cycle == 1 else 1)
    sequence.resize(capacity=6)
    sequence.commit(range(6))
    for _ in range(2):
        with pytest.raises(ConfigError, match="priority is 101"):
            sequence.stop_committing()
    with contextlib.suppress(ConfigError):
        sequence.close()
    manager.clear_reusable()
    assert not manager.published.tree._references.any()
    manager.check_integrity()
