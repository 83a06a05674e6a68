"""What every transport promises of reads, checked on each of them with both agents in this process."""

import numpy as np
import pytest
import torch

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.base import Indices, Notification, Operation, PostState
from tests.transport_contract.agents import NUM_RUNS, RUN_BYTES, Pair, indices


@pytest.fixture
def reading(pair: Pair) -> Pair:
    """The target has something to read, the writer nothing."""
    pair.target.memory.copy_(pair.writer.memory)
    pair.writer.memory.zero_()
    return pair


def has_read(pair: Pair, local: int, remote: int) -> bool:
    """Whether our run `local` holds run `remote` of the peer."""
    ours = pair.writer.memory[local * RUN_BYTES : (local + 1) * RUN_BYTES]
    return torch.equal(ours, pair.target.memory[remote * RUN_BYTES : (remote + 1) * RUN_BYTES])


def test_read_one_run_lands_here_and_nothing_else_changes_on_either_side(reading: Pair) -> None:
    before = reading.target.memory.clone()
    post = reading.read(indices(3), indices(7))
    assert has_read(reading, 3, 7)
    assert torch.equal(reading.target.memory, before)
    assert int(reading.writer.memory.count_nonzero()) == int(before[7 * RUN_BYTES : 8 * RUN_BYTES].count_nonzero())
    assert (post.num_descriptors, post.num_bytes) == (1, RUN_BYTES)


def test_read_notifies_the_owner_once_all_bytes_are_here(reading: Pair) -> None:
    count = 20
    for step in range(count):
        post = reading.post(indices(step, 100 + step), indices(step, 130 + step), b"step %d" % step, Operation.READ)
        heard = len(reading.target.heard)
        while len(reading.target.heard) == heard:
            reading.writer.transport.poll(post)
            reading.target.listen()
        assert has_read(reading, step, step)
        assert has_read(reading, 100 + step, 130 + step)
        assert reading.finish(post) is PostState.DONE
    assert reading.target.heard == [Notification("writer", b"step %d" % step) for step in range(count)]


def test_read_of_what_the_owner_changes_afterwards_keeps_what_was_there(reading: Pair) -> None:
    reading.read(indices(0), indices(0))
    was = reading.target.memory[:RUN_BYTES].clone()
    reading.target.memory.zero_()
    assert torch.equal(reading.writer.memory[:RUN_BYTES], was)


@pytest.mark.parametrize(
    "local, remote, expected",
    [(range(64), range(100, 164), 1), ([0, 1, 2, 3], [9, 8, 7, 6], 4), (range(0, 128, 2), range(64), 64)],
)
def test_read_neighbouring_runs_merge_into_one_descriptor(
    reading: Pair, local: range | list[int], remote: range | list[int], expected: int
) -> None:
    post = reading.read(indices(*local), indices(*remote))
    assert post.num_descriptors == expected
    assert all(has_read(reading, ours, theirs) for ours, theirs in zip(local, remote, strict=True))


@pytest.mark.parametrize(
    "local, remote", [(indices(), indices()), (indices(0, 1), indices(0)), (indices(NUM_RUNS), indices(0))]
)
def test_read_wrong_indices_raises_and_reads_nothing(reading: Pair, local: Indices, remote: Indices) -> None:
    with pytest.raises(TransportError) as caught:
        reading.post(local, remote, b"n", Operation.READ)
    assert caught.value.status == "INVALID"
    assert not reading.writer.memory.any()


def test_read_with_released_list_or_into_a_peers_memory_raises(reading: Pair) -> None:
    transport = reading.writer.transport
    with pytest.raises(TransportError, match="local runs are our own"):
        transport.post(reading.target_runs, indices(0), reading.own_runs, indices(0), b"n", Operation.READ)
    reading.target_runs.release()
    with pytest.raises(TransportError, match="was released"):
        reading.post(indices(0), indices(0), b"n", Operation.READ)


def test_reads_and_writes_over_the_same_lists_keep_apart(reading: Pair) -> None:
    reading.writer.memory[:RUN_BYTES] = 77
    posts = [
        reading.post(indices(0), indices(9), b"write"),
        reading.post(indices(1), indices(8), b"read", Operation.READ),
    ]
    for post in posts:
        assert reading.finish(post) is PostState.DONE
    reading.finish(posts[1], 2)
    assert {notification.payload for notification in reading.target.heard} == {b"write", b"read"}
    assert (reading.target.memory[9 * RUN_BYTES : 10 * RUN_BYTES] == 77).all()
    assert has_read(reading, 1, 8)


def test_read_post_polls_and_releases_as_a_write_does(reading: Pair) -> None:
    post = reading.read(indices(0), indices(0))
    assert reading.writer.transport.release(post)
    assert reading.writer.transport.poll(post) is PostState.DONE
    assert str(post).startswith("READ of ")


def test_read_from_closed_agent_never_succeeds(reading: Pair) -> None:
    reading.read(indices(0), indices(0))
    reading.target.transport.close()
    try:
        post = reading.post(indices(1), indices(1), b"n", Operation.READ)
    except TransportError:
        return
    while reading.writer.transport.poll(post) is PostState.IN_PROGRESS:
        pass
    assert reading.writer.transport.poll(post) is PostState.FAILED


def test_read_random_runs(reading: Pair) -> None:
    order = np.random.default_rng(7).permutation(NUM_RUNS).astype(np.int32)
    reading.read(order, np.ascontiguousarray(order[::-1]))
    assert all(has_read(reading, int(ours), int(theirs)) for ours, theirs in zip(order, order[::-1], strict=True))
