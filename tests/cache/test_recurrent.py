"""The recurrent state of a sequence: one page, copied as a snapshot, matched only where it stands."""

import torch

from kvferry.cache.admission import PoolOptions
from kvferry.cache.holds import Access
from kvferry.cache.ids import LifeCycleId
from kvferry.cache.layout import build_layout
from kvferry.cache.manager import KVCacheManager
from kvferry.cache.sequence import SequenceCache
from tests.cache.serving import manager_of, present, started
from tests.cache.specs import attention, model, recurrent

STATE = LifeCycleId(1)
TOKENS = list(range(40))


def hybrid(*, attention_slots: int = 32, states: int = 8, **options: object) -> KVCacheManager:
    layout = build_layout(model(attention(), recurrent(2, 3)), tokens_per_block=4)
    assert len(layout.pool_groups) == 2
    return KVCacheManager(layout, [attention_slots, states], options=PoolOptions(**options))


def compute(manager: KVCacheManager, sequence: SequenceCache, end: int, *, snapshot: bool = False) -> None:
    """Compute up to `end` and commit; the state is the number of tokens it has seen."""
    sequence.resize(capacity=end)
    manager.state(1, "ssm_state")[sequence.state_slot] = float(end)
    sequence.commit(TOKENS[sequence.committed : end], snapshot=snapshot)
    manager.check_integrity()


def state_of(manager: KVCacheManager, sequence: SequenceCache) -> float:
    value = manager.state(1, "ssm_state")[sequence.state_slot]
    assert torch.equal(value, torch.full_like(value, float(value[0, 0])))
    return float(value[0, 0])


def leave(manager: KVCacheManager, end: int) -> None:
    sequence = started(manager)
    compute(manager, sequence, end)
    sequence.close()


def test_state_is_one_page_that_moves_with_history_and_keeps_its_slot() -> None:
    manager = hybrid()
    sequence = started(manager)
    slots = set()
    for end in (3, 4, 9, 20):
        compute(manager, sequence, end)
        slots.add(sequence.state_slot)
        assert present(sequence, STATE) == [max(0, -(-end // 4) - 1)]
        assert state_of(manager, sequence) == end
    assert len(slots) == 1
    sequence.close()
    assert manager.usage()[1].held == 0


def test_state_at_the_end_is_left_and_matched_only_where_it_stands() -> None:
    manager = hybrid()
    leave(manager, 10)
    assert [manager.probe(TOKENS[:n]) for n in (8, 9, 10, 11, 20)] == [0, 0, 10, 10, 10]
    assert manager.usage()[1].cached == 1


def test_reused_state_is_a_copy_and_the_snapshot_stays() -> None:
    manager = hybrid()
    leave(manager, 10)
    sequence = started(manager, TOKENS[:15])
    assert (sequence.reused_tokens, state_of(manager, sequence)) == (10, 10.0)
    compute(manager, sequence, 15)
    again = started(manager, TOKENS[:10])
    assert (again.reused_tokens, state_of(manager, again)) == (10, 10.0)


def test_snapshot_asked_for_at_a_full_block_is_left_on_the_way() -> None:
    manager = hybrid()
    sequence = started(manager)
    compute(manager, sequence, 8, snapshot=True)
    compute(manager, sequence, 10, snapshot=True)  # not at the end of a block: none is made
    compute(manager, sequence, 12)
    assert [manager.probe(TOKENS[:n]) for n in (8, 11, 12)] == [8, 8, 8]
    sequence.close()
    assert [manager.probe(TOKENS[:n]) for n in (8, 11, 12)] == [8, 8, 12]


def test_snapshot_is_left_out_when_history_ran_ahead_of_the_committed_tokens() -> None:
    manager = hybrid()
    sequence = started(manager)
    sequence.resize(capacity=12, history=12)
    sequence.commit(TOKENS[:8], snapshot=True)
    sequence.close()
    assert manager.probe(TOKENS[:8]) == 0


def test_snapshot_without_a_free_state_slot_is_left_out() -> None:
    manager = hybrid(states=1)
    sequence = started(manager)
    compute(manager, sequence, 8, snapshot=True)
    assert manager.probe(TOKENS[:8]) == 0
    manager.check_integrity()


def test_snapshot_takes_the_slot_of_the_oldest_one() -> None:
    manager = hybrid(states=2)
    sequence = started(manager)
    compute(manager, sequence, 4, snapshot=True)
    compute(manager, sequence, 8, snapshot=True)
    assert [manager.probe(TOKENS[:n]) for n in (4, 8)] == [0, 8]


def test_only_copy_of_a_state_is_taken_over_when_there_is_no_room_for_another() -> None:
    """One state slot: the snapshot becomes the sequence's own, and cannot be matched any more."""
    manager = hybrid(states=1)
    leave(manager, 8)
    assert manager.probe(TOKENS[:8]) == 0  # the state itself took the only slot
    manager = hybrid(states=2)
    leave(manager, 8)
    other = started(manager)
    compute(manager, other, 1)
    sequence = started(manager, TOKENS[:8])
    assert (sequence.reused_tokens, state_of(manager, sequence)) == (8, 8.0)
    assert manager.probe(TOKENS[:8]) == 0
    manager.check_integrity()


def test_match_for_a_transfer_takes_whole_blocks_without_a_snapshot() -> None:
    manager = hybrid()
    leave(manager, 10)
    sequence = manager.create_sequence("s", token_ids=TOKENS[:15], for_transfer=True)
    assert (sequence.reused_tokens, sequence.borrowed) == (8, ())
    sequence.resume()
    sequence.resize(capacity=15, history=15)
    assert present(sequence, STATE) == [3]
    manager.check_integrity()


def test_state_that_was_never_received_is_not_published() -> None:
    """A sequence that matched whole blocks for a transfer and is closed before it: its state page holds anything."""
    manager = hybrid()
    leave(manager, 10)
    sequence = manager.create_sequence("s", token_ids=TOKENS[:15], for_transfer=True)
    sequence.resume()
    manager.state(1, "ssm_state")[sequence.state_slot] = -1.0
    sequence.commit((), snapshot=True)
    sequence.close()
    assert manager.probe(TOKENS[:8]) == 0
    manager.check_integrity()


def test_state_that_a_transfer_still_writes_is_not_published() -> None:
    manager = hybrid()
    sequence = started(manager)
    compute(manager, sequence, 7)
    hold = manager.hold(sequence.pages(7, skip_blocks=1), Access.WRITE)
    assert [usage.transferring for usage in manager.usage()] == [1, 1]
    sequence.close()
    assert [usage.cached for usage in manager.usage()] == [1, 0]
    manager.release(hold)
    assert manager.usage()[1].free == 8
    manager.check_integrity()


def test_conversation_whose_own_end_is_evicted_for_its_snapshot_closes_all_the_same() -> None:
    """Its last block was another's longer one, used by nobody; the state's copy takes the only slot there is."""
    manager = manager_of(attention(heads=1, head_dim=2), recurrent(16), slots=3, policy="per_conversation")
    first = started(manager)
    first.resize(capacity=4)
    first.commit(TOKENS[:4])
    first.suspend()
    first.close()
    second = started(manager)
    second.resize(capacity=2)
    second.commit(TOKENS[:2])
    assert manager.usage()[0].free == 0
    second.close()
    manager.check_integrity()
    assert [usage.held for usage in manager.usage()] == [0]


def test_unequal_slots_of_state_and_attention_share_one_group_only_when_equal() -> None:
    manager = manager_of(attention(heads=1, head_dim=2), recurrent(16))
    assert [len(group.life_cycles) for group in manager.layout.pool_groups] == [2]
    sequence = started(manager)
    sequence.resize(capacity=8)
    assert manager.usage()[0].held == 3
    manager.check_integrity()


def test_hybrid_of_one_token_and_an_empty_request_take_2_states_and_2_blocks() -> None:
    """Slots of {64, 63} + {0, 0}: an empty request takes its state with its first token; until then it takes none."""
    layout = build_layout(model(attention(), recurrent(2, 3)), tokens_per_block=32)
    manager = KVCacheManager(layout, [8, 8])
    first, second = started(manager), started(manager)
    first.resize(capacity=64, history=63)
    assert [usage.held for usage in manager.usage()] == [2, 1]
    second.resize(capacity=1)
    assert [usage.held for usage in manager.usage()] == [3, 2]


def test_state_that_a_step_has_moved_on_is_not_published_at_the_end() -> None:
    """The step ran, and its result was thrown away: the request was cancelled."""
    manager = manager_of(attention(), recurrent(2, 3), slots=16)
    sequence = started(manager)
    sequence.resize(capacity=8)
    sequence.commit(range(8))
    sequence.resize(capacity=12)
    sequence.close()
    assert manager.probe(range(8)) == 0
