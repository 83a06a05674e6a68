"""The rule: which facts prove which lanes. And the books on what has been read from sockets."""

import itertools

import pytest

from kvferry.transfer.transport.quiescence import NEEDED, Condition, Drain, Fact, Stream, judge

ALL = tuple(Condition)
GONE, DRAINED, INVALIDATED = Condition.WRITER_GONE, Condition.STREAMS_DRAINED, Condition.KEY_INVALIDATED
RULES = {
    "cma": {GONE},
    "shm": {GONE},
    "cuda_ipc": {GONE},
    "memcpy": {GONE},
    "tcp": {GONE, DRAINED},
    "rdma": {INVALIDATED},
    "cma+tcp": {GONE, DRAINED},
    "cuda_ipc+rdma": {GONE, INVALIDATED},
}


def facts_of(holding: set[Condition]) -> dict[Condition, Fact]:
    return {each: Fact(each in holding, f"{each.name}:{'yes' if each in holding else 'no'}") for each in ALL}


@pytest.mark.parametrize("lane", RULES)
def test_lane_is_proven_by_exactly_what_it_needs(lane: str) -> None:
    for count in range(len(ALL) + 1):
        for holding in itertools.combinations(ALL, count):
            found = judge(lane, (), facts_of(set(holding)))
            assert found.proven == (RULES[lane] <= set(holding)), (holding, found)


def test_every_lane_has_a_rule() -> None:
    assert NEEDED.keys() == {name for lane in RULES for name in lane.split("+")}
    assert all(NEEDED.values())


@pytest.mark.parametrize("lane", ["unknown", "", "rocm_ipc", "cma+warp"])
def test_unknown_lane_needs_what_every_possible_lane_needs(lane: str) -> None:
    assert judge(lane, {"cma", "tcp"}, facts_of({GONE, DRAINED})).proven
    assert not judge(lane, {"cma", "tcp"}, facts_of({GONE})).proven
    assert not judge(lane, {"cma", "tcp", "rdma"}, facts_of({GONE, DRAINED})).proven
    assert judge(lane, {"cma", "tcp", "rdma"}, facts_of(set(ALL))).proven


def test_nothing_is_proven_without_a_lane_or_without_facts() -> None:
    assert not judge("unknown", (), facts_of(set(ALL))).proven
    for lane in RULES:
        assert not judge(lane, (), {}).proven


def test_story_tells_the_proof_or_all_that_is_missing() -> None:
    assert judge("tcp", (), facts_of({GONE, DRAINED})).story == "over tcp: WRITER_GONE:yes; STREAMS_DRAINED:yes"
    assert judge("tcp", (), facts_of({GONE})).story == "over tcp: STREAMS_DRAINED:no"
    assert judge("unknown", {"tcp", "rdma"}, facts_of(set())).story == (
        "over rdma or tcp: WRITER_GONE:no; STREAMS_DRAINED:no; KEY_INVALIDATED:no"
    )
    assert "not verified on cuda_ipc hardware" in judge("cuda_ipc", (), facts_of({GONE})).story


def stream(read: int, sent: int | None, inode: int = 1) -> Stream:
    return Stream(inode, f"socket {inode}", read, sent)


def test_drain_holds_once_all_sent_before_the_first_look_is_read_whatever_came_later() -> None:
    drain = Drain()
    assert not drain.look([stream(10, 100)]).holds
    assert not drain.look([stream(99, 5000)]).holds
    assert drain.look([stream(100, 9000)]).holds


def test_drain_takes_the_lowest_bound_since_bytes_on_their_way_can_be_counted_twice() -> None:
    drain = Drain()
    assert not drain.look([stream(50, 150)]).holds
    assert drain.look([stream(100, 100)]).holds


def test_drain_waits_while_a_stream_has_no_bound_and_until_it_is_closed() -> None:
    drain = Drain()
    for _ in range(3):
        found = drain.look([stream(10, None), stream(5, 5, inode=2)])
        assert not found.holds
        assert "socket 1" in found.story
        assert "socket 2" not in found.story
    assert drain.look([stream(5, 5, inode=2)]).holds


def test_drain_uses_an_earlier_bound_where_there_is_none_now() -> None:
    drain = Drain()
    assert not drain.look([stream(10, 20)]).holds
    assert drain.look([stream(20, None)]).holds


def test_drain_that_held_holds_for_good() -> None:
    drain = Drain()
    assert drain.look([]).holds
    assert drain.look([stream(0, None)]).holds


def test_drain_story_is_short_with_many_streams() -> None:
    found = Drain().look([stream(0, 1, inode) for inode in range(5000)])
    assert found.story.endswith("socket 2 and 4997 more")
