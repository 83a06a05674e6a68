"""Turns of conversations: what is kept to go on from one goes when a later one has, and nothing else does."""

from kvferry.cache.manager import KVCacheManager
from tests.cache.serving import manager_of, publish
from tests.cache.specs import attention

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
