"""What every transport promises, checked on each of them with both agents in this process."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.base import MAX_NOTIFICATION_BYTES, Notification, Post, PostState
from tests.transport_contract.agents import NUM_RUNS, RUN_BYTES, Agent, Pair, connected, indices, runs
from tests.transport_contract.conftest import MakeAgent


def written(pair: Pair, local: int, remote: int) -> bool:
    """Whether run `remote` of the target holds run `local` of the writer."""
    source = pair.writer.memory[local * RUN_BYTES : (local + 1) * RUN_BYTES]
    return torch.equal(source, pair.target.memory[remote * RUN_BYTES : (remote + 1) * RUN_BYTES])


def refused(call: Callable[[], object]) -> str:
    """The status of the TransportError the call raises."""
    with pytest.raises(TransportError) as caught:
        call()
    return caught.value.status


class ForeignPost(Post):
    num_descriptors = 1
    num_bytes = 1


def test_write_one_run_lands_and_nothing_else_changes(pair: Pair) -> None:
    post = pair.write(indices(3), indices(7))
    assert written(pair, 3, 7)
    assert int(pair.target.memory.count_nonzero()) == int(pair.writer.memory[:RUN_BYTES].count_nonzero())
    assert (post.num_descriptors, post.num_bytes) == (1, RUN_BYTES)


def test_write_notifies_target_after_data(pair: Pair) -> None:
    count = 20
    for step in range(count):
        post = pair.post(indices(step, 100 + step), indices(step, 100 + step), b"step %d" % step)
        heard = len(pair.target.heard)
        while len(pair.target.heard) == heard:
            pair.writer.transport.poll(post)
            pair.target.listen()
        assert written(pair, step, step)
        assert written(pair, 100 + step, 100 + step)
        assert pair.finish(post) is PostState.DONE
    assert pair.target.heard == [Notification("writer", b"step %d" % step) for step in range(count)]


def test_notifications_of_posts_under_way_together_arrive_each_once(pair: Pair) -> None:
    posts = [pair.post(indices(step), indices(step), bytes([step])) for step in range(16)]
    for post in posts:
        assert pair.finish(post) is PostState.DONE
    pair.finish(posts[-1], len(posts))
    assert sorted(notification.payload for notification in pair.target.heard) == [bytes([step]) for step in range(16)]


@pytest.mark.parametrize(
    "local, remote, expected",
    [
        (range(64), range(64), 1),
        (range(64), range(100, 164), 1),
        ([0, 1, 2, 10, 11, 12], [0, 1, 2, 3, 4, 5], 2),
        ([0, 1, 2, 3], [9, 8, 7, 6], 4),
        (range(0, 128, 2), range(64), 64),
    ],
)
def test_write_neighbouring_runs_merge_into_one_descriptor(
    pair: Pair, local: range | list[int], remote: range | list[int], expected: int
) -> None:
    post = pair.write(indices(*local), indices(*remote))
    assert post.num_descriptors == expected
    assert post.num_bytes == len(local) * RUN_BYTES
    assert all(written(pair, source, target) for source, target in zip(local, remote, strict=True))


def test_write_random_runs_stay_apart(pair: Pair) -> None:
    order = np.random.default_rng(7).permutation(NUM_RUNS).astype(np.int32)
    apart = order[np.insert(np.abs(np.diff(order)) != 1, 0, True)]
    post = pair.write(apart, np.ascontiguousarray(apart[::-1]))
    assert post.num_descriptors == len(apart)
    assert all(written(pair, int(source), int(target)) for source, target in zip(apart, apart[::-1], strict=True))


def test_write_indices_that_are_not_contiguous_in_memory_are_read_right(pair: Pair) -> None:
    every_second = np.arange(20, dtype=np.int32)[::2]
    pair.write(every_second, every_second)
    assert written(pair, 18, 18)
    assert not written(pair, 17, 17)


@pytest.mark.parametrize(
    "local, remote",
    [
        (indices(), indices()),
        (indices(0, 1), indices(0)),
        (indices(0), indices(0, 1)),
        (indices(NUM_RUNS), indices(0)),
        (indices(0), indices(NUM_RUNS)),
        (indices(-1), indices(0)),
        (indices(0), indices(-1)),
        (np.zeros(1, np.int64), indices(0)),
        (np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32)),
    ],
)
def test_post_wrong_indices_raises_and_writes_nothing(pair: Pair, local: np.ndarray, remote: np.ndarray) -> None:
    assert refused(lambda: pair.post(local, remote)) == "INVALID"
    pair.write(indices(5), indices(5), b"only this")
    assert [notification.payload for notification in pair.target.heard] == [b"only this"]
    assert not written(pair, 0, 0)


def test_post_runs_of_unequal_length_raises(pair: Pair) -> None:
    halves = pair.writer.transport.prepare(None, runs(pair.writer.memory, run_bytes=RUN_BYTES // 2))
    pair.own_runs = halves
    assert refused(lambda: pair.post(indices(0), indices(0))) == "INVALID"


@pytest.mark.parametrize("num_bytes", [0, MAX_NOTIFICATION_BYTES + 1])
def test_post_notification_of_wrong_size_raises(pair: Pair, num_bytes: int) -> None:
    assert refused(lambda: pair.post(indices(0), indices(0), b"x" * num_bytes)) == "INVALID"


@pytest.mark.parametrize("payload", [b"\0", b"\0" * 8 + b"\xff", bytes(range(256)) * (MAX_NOTIFICATION_BYTES // 256)])
def test_post_notification_arrives_byte_for_byte(pair: Pair, payload: bytes) -> None:
    pair.write(indices(0), indices(0), payload)
    assert pair.target.heard == [Notification("writer", payload)]


def test_post_towards_own_memory_or_from_a_peers_raises(pair: Pair) -> None:
    transport = pair.writer.transport
    assert refused(lambda: transport.post(pair.own_runs, indices(0), pair.own_runs, indices(1), b"n")) == "INVALID"
    assert (
        refused(lambda: transport.post(pair.target_runs, indices(0), pair.target_runs, indices(1), b"n")) == "INVALID"
    )


def test_post_lists_of_another_agent_raises(pair: Pair) -> None:
    pair.own_runs = pair.target.transport.prepare(None, runs(pair.target.memory))
    assert refused(lambda: pair.post(indices(0), indices(0))) == "RELEASED"


def test_post_released_list_raises(pair: Pair) -> None:
    pair.target_runs.release()
    assert refused(lambda: pair.post(indices(0), indices(0))) == "RELEASED"


def test_release_list_twice_changes_nothing(pair: Pair) -> None:
    pair.own_runs.release()
    pair.own_runs.release()
    assert len(pair.own_runs) == NUM_RUNS


def test_release_post_twice_is_true_and_poll_keeps_its_answer(pair: Pair) -> None:
    post = pair.write(indices(0), indices(0))
    assert pair.writer.transport.release(post)
    assert pair.writer.transport.release(post)
    assert pair.writer.transport.poll(post) is PostState.DONE


def test_poll_and_release_foreign_post_raises(pair: Pair) -> None:
    assert refused(lambda: pair.writer.transport.poll(ForeignPost())) == "INVALID"
    assert refused(lambda: pair.writer.transport.release(ForeignPost())) == "INVALID"


@pytest.mark.parametrize("shift, num_bytes", [(-1, 16), (0, NUM_RUNS * RUN_BYTES + 1), (NUM_RUNS * RUN_BYTES - 8, 16)])
def test_prepare_run_outside_registered_memory_raises(pair: Pair, shift: int, num_bytes: int) -> None:
    for peer, memory in ((None, pair.writer.memory), (pair.target_name, pair.target.memory)):
        row = np.array([[memory.data_ptr() + shift, num_bytes, 0]], np.uint64)
        assert refused(lambda peer=peer, row=row: pair.writer.transport.prepare(peer, row)) == "OUTSIDE"


def test_prepare_run_on_another_device_or_at_the_end_of_the_address_space_raises(pair: Pair) -> None:
    base = pair.writer.memory.data_ptr()
    for row in ([base, 16, 1], [2**64 - 8, 16, 0], [base, 2**64 - 1, 0], [0, 16, 0]):
        assert refused(lambda row=row: pair.writer.transport.prepare(None, np.array([row], np.uint64))) == "OUTSIDE"


def test_prepare_malformed_list_raises(pair: Pair) -> None:
    base = pair.writer.memory.data_ptr()
    malformed = [
        np.zeros((0, 3), np.uint64),
        np.array([[base, 16]], np.uint64),
        np.array([base, 16, 0], np.uint64),
        np.array([[base, 16, 0]], np.int64),
        np.array([[base, 0, 0]], np.uint64),
    ]
    for descriptors in malformed:
        assert refused(lambda rows=descriptors: pair.writer.transport.prepare(None, rows)) == "INVALID"


def test_prepare_whole_region_and_its_last_byte_works(pair: Pair) -> None:
    base, size = pair.writer.memory.data_ptr(), len(pair.writer.memory)
    assert (
        len(pair.writer.transport.prepare(None, np.array([[base, size, 0], [base + size - 1, 1, 0]], np.uint64))) == 2
    )


def test_prepare_unknown_peer_raises(pair: Pair) -> None:
    assert refused(lambda: pair.writer.transport.prepare("nobody", runs(pair.target.memory))) == "UNKNOWN_PEER"


def test_runs_of_two_regions_do_not_merge_over_their_border(make_agent: MakeAgent) -> None:
    writer, target = make_agent("writer"), make_agent("target")
    source, both = torch.full((64,), 9, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    writer.register([source])
    target.register([both[:32], both[32:]])
    pair = connected(Agent(writer, source), Agent(target, both), num_runs=2, run_bytes=32)
    assert pair.write(indices(0, 1), indices(0, 1)).num_descriptors == 2
    assert torch.equal(both, source)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.int32),
        torch.zeros((2, 8), dtype=torch.uint8),
        torch.zeros(16, dtype=torch.uint8)[::2],
    ],
    ids=["empty", "int32", "2-D", "strided"],
)
def test_register_unfit_tensor_raises(make_agent: MakeAgent, tensor: torch.Tensor) -> None:
    assert refused(lambda: make_agent("one").register([tensor])) == "INVALID"


def test_register_overlapping_memory_raises_and_keeps_what_was_registered(pair: Pair) -> None:
    assert refused(lambda: pair.target.transport.register([pair.target.memory[16:32]])) == "OVERLAP"
    pair.write(indices(0), indices(0))


def test_register_nothing_then_prepare_raises(make_agent: MakeAgent) -> None:
    agent = make_agent("one")
    agent.register([])
    assert refused(lambda: agent.prepare(None, runs(torch.zeros(4096, dtype=torch.uint8), 1))) == "OUTSIDE"


def test_connect_again_with_same_metadata_changes_nothing(pair: Pair) -> None:
    assert pair.writer.transport.connect(pair.target.transport.metadata()) == "target"
    pair.write(indices(0), indices(0))


def test_connect_known_name_with_other_metadata_raises(pair: Pair) -> None:
    more = torch.zeros(64, dtype=torch.uint8)
    pair.target.transport.register([more])
    assert refused(lambda: pair.writer.transport.connect(pair.target.transport.metadata())) == "CONNECTED"


def test_connect_to_itself_raises(pair: Pair) -> None:
    assert refused(lambda: pair.writer.transport.connect(pair.writer.transport.metadata())) == "INVALID"


@pytest.mark.parametrize("cut", [0, 3, 4, 20, -1])
def test_connect_damaged_metadata_raises(pair: Pair, cut: int) -> None:
    with pytest.raises(TransportError):
        pair.target.transport.connect(pair.writer.transport.metadata()[:cut])


def test_connect_other_bytes_raises(pair: Pair) -> None:
    for metadata in (b"\0\0\0\2[]", b"\0\0\0\2{}", b"\xff" * 64, b"\0\0\0\4null"):
        assert refused(lambda metadata=metadata: pair.writer.transport.connect(metadata)) == "METADATA"


def test_both_directions_work_at_once(pair: Pair) -> None:
    back = pair.target.transport
    peer = back.connect(pair.writer.transport.metadata())
    source = back.prepare(None, runs(pair.target.memory))
    target = back.prepare(peer, runs(pair.writer.memory))
    there = pair.post(indices(0), indices(0), b"there")
    here = back.post(source, indices(9), target, indices(9), b"here")
    assert pair.finish(there) is PostState.DONE
    heard: list[Notification] = []
    while back.poll(here) is PostState.IN_PROGRESS or not heard:
        heard += pair.writer.transport.notifications()
    assert heard == [Notification("target", b"here")]
    assert int(pair.writer.memory[9 * RUN_BYTES : 10 * RUN_BYTES].count_nonzero()) == 0


def test_disconnect_with_lists_held_raises(pair: Pair) -> None:
    assert refused(lambda: pair.writer.transport.disconnect(pair.target_name)) == "IN_USE"


def test_disconnect_then_connect_again_works(pair: Pair) -> None:
    pair.write(indices(0), indices(0))
    pair.target_runs.release()
    pair.writer.transport.disconnect(pair.target_name)
    assert refused(lambda: pair.writer.transport.prepare(pair.target_name, runs(pair.target.memory))) == "UNKNOWN_PEER"
    peer = pair.writer.transport.connect(pair.target.transport.metadata())
    pair.target_runs = pair.writer.transport.prepare(peer, runs(pair.target.memory))
    pair.write(indices(1), indices(1))
    assert written(pair, 1, 1)


def test_disconnect_unknown_peer_is_ignored(pair: Pair) -> None:
    pair.writer.transport.disconnect("nobody")
    pair.write(indices(0), indices(0))
    assert written(pair, 0, 0)


def test_lane_of_unknown_peer_raises(pair: Pair) -> None:
    assert refused(lambda: pair.writer.transport.lane("nobody")) == "UNKNOWN_PEER"


def test_closed_agent_refuses_everything(pair: Pair) -> None:
    post = pair.write(indices(0), indices(0))
    transport, peer_metadata = pair.writer.transport, pair.target.transport.metadata()
    transport.close()
    calls: list[Callable[[], object]] = [
        lambda: transport.register([torch.zeros(8, dtype=torch.uint8)]),
        transport.metadata,
        lambda: transport.connect(peer_metadata),
        lambda: transport.disconnect("target"),
        lambda: transport.prepare(None, runs(pair.writer.memory)),
        lambda: pair.post(indices(0), indices(0)),
        lambda: transport.poll(post),
        lambda: transport.release(post),
        transport.notifications,
        lambda: transport.lane("target"),
    ]
    assert [refused(call) for call in calls] == ["CLOSED"] * len(calls)


def test_close_twice_and_release_lists_later_changes_nothing(pair: Pair) -> None:
    pair.writer.transport.close()
    pair.writer.transport.close()
    pair.own_runs.release()
    assert "closed" in repr(pair.writer.transport)


def test_write_to_closed_agent_never_succeeds(pair: Pair) -> None:
    pair.write(indices(0), indices(0))
    pair.target.transport.close()
    try:
        post = pair.post(indices(1), indices(1))
    except TransportError:
        return
    while pair.writer.transport.poll(post) is PostState.IN_PROGRESS:
        pass
    assert pair.writer.transport.poll(post) is PostState.FAILED
    assert "peer" in str(post)


@pytest.mark.parametrize("agent_name", ["", "n" * 256])
def test_agent_with_unfit_name_raises(make_agent: MakeAgent, agent_name: str) -> None:
    assert refused(lambda: make_agent(agent_name)) == "INVALID"
