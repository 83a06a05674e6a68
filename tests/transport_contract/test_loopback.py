"""What only agents of one process do."""

import threading

import numpy as np
import pytest
import torch

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport import loopback
from kvferry.transfer.transport.base import PostState
from kvferry.transfer.transport.loopback import LoopbackTransport
from tests.transport_contract.agents import Agent, Pair, connected, indices


def make_pair(device: str = "cpu") -> Pair:
    agents = []
    for name in ("loop-writer", "loop-target"):
        transport = LoopbackTransport(name)
        memory = torch.arange(1024, dtype=torch.int32, device=device).to(torch.uint8)
        transport.register([memory])
        agents.append(Agent(transport, memory))
    return connected(agents[0], agents[1], num_runs=16, run_bytes=64)


def close(pair: Pair) -> None:
    pair.writer.transport.close()
    pair.target.transport.close()


def test_second_agent_of_a_name_is_refused_until_the_first_closes() -> None:
    first = LoopbackTransport("twice")
    with pytest.raises(TransportError, match="open agent named twice"):
        LoopbackTransport("twice")
    first.close()
    LoopbackTransport("twice").close()


def test_post_to_a_later_agent_of_the_same_name_raises_and_writes_nothing() -> None:
    pair = make_pair()
    pair.target.transport.close()
    later = LoopbackTransport("loop-target")
    later.register([pair.target.memory])
    before = pair.target.memory.clone()
    with pytest.raises(TransportError, match="no longer"):
        pair.post(indices(1), indices(2))
    assert torch.equal(pair.target.memory, before)
    later.close()
    close(pair)


def test_post_to_target_with_a_full_queue_raises_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "MAX_WAITING_NOTIFICATIONS", 2)
    pair = make_pair()
    pair.post(indices(0), indices(0))
    pair.post(indices(0), indices(0))
    before = pair.target.memory.clone()
    with pytest.raises(TransportError, match="has not read"):
        pair.post(indices(1), indices(2))
    assert torch.equal(pair.target.memory, before)
    assert len(pair.target.transport.notifications()) == 2
    pair.post(indices(1), indices(2))
    close(pair)


def test_lane_is_memcpy() -> None:
    pair = make_pair()
    assert pair.writer.transport.lane("loop-target") == "memcpy"
    close(pair)


def test_two_threads_write_to_each_other() -> None:
    pair = make_pair()
    peer = pair.target.transport.connect(pair.writer.transport.metadata())
    rows = (
        np.array([[pair.target.memory.data_ptr(), 64, 0]], np.uint64),
        np.array([[pair.writer.memory.data_ptr(), 64, 0]], np.uint64),
    )
    source, target = pair.target.transport.prepare(None, rows[0]), pair.target.transport.prepare(peer, rows[1])

    def back() -> None:
        for _ in range(500):
            pair.target.transport.post(source, indices(0), target, indices(0), b"back")

    thread = threading.Thread(target=back)
    thread.start()
    for _ in range(500):
        assert pair.writer.transport.poll(pair.post(indices(1), indices(1), b"there")) is PostState.DONE
    thread.join(20.0)
    assert not thread.is_alive()
    assert len(pair.writer.transport.notifications()) == len(pair.target.transport.notifications()) == 500
    close(pair)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_write_between_cuda_tensors_lands() -> None:
    pair = make_pair("cuda")
    pair.target.memory.zero_()
    pair.write(indices(3), indices(5))
    assert torch.equal(pair.target.memory[320:384], pair.writer.memory[192:256])
    close(pair)
