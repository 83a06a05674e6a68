"""When it is proven that a peer's writes are over, over real NIXL between two processes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.loopback import LoopbackTransport
from kvferry.transfer.transport.memory import AgentCard
from kvferry.transfer.transport.nixl import NixlTransport
from tests.helpers import wait_until
from tests.transport_contract.agent_programs import AgentProgram, connect, write

LANES = [pytest.param({}, id="cma"), pytest.param({"UCX_TLS": "tcp"}, id="tcp")]
TCP = {"UCX_TLS": "tcp"}
NUM_RUNS = 64
MIB = 1 << 20
EVERY = list(range(NUM_RUNS))
PROOF_SECONDS = 0.02
"""A proof is asked for on the thread that moves everyone's data. A tenth of this is usual."""

pytestmark = pytest.mark.timeout(180)


class Doubt:
    """A target whose memory is all 0 and a writer about to write 5 into all of it."""

    def __init__(self, writer: AgentProgram, target: AgentProgram) -> None:
        self.writer, self.target = writer, target
        connect(writer, target)
        self.metadata = writer.ask("describe")["metadata"]
        write(writer, target, 1, [0], [0])
        wait_until(lambda: target.ask("listened")["heard"], 10.0, "the target hears of the first write")
        writer.ask("set_all", value=5)
        target.ask("set_all", value=0)

    def send(self) -> None:
        """Have the writer start. Its answer is left to be received."""
        self.writer.send("post", peer="target", seed=1, local=EVERY, remote=EVERY)

    def proof(self) -> dict[str, Any]:
        return self.target.ask("proof", metadata=self.metadata)

    def proven(self) -> bool:
        return bool(self.proof()["proven"])

    def values(self) -> dict[str, int]:
        values = self.target.ask("values")["values"]
        assert isinstance(values, dict)
        return values

    def landed(self) -> int:
        return int(self.target.ask("landed")["num_bytes"])

    def check_memory_stays(self) -> None:
        before = self.landed()
        for _ in range(5):
            self.target.ask("progress", rounds=200)
            assert self.landed() == before
            assert self.proven()


StartDoubt = Callable[..., Doubt]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartDoubt]:
    with ExitStack() as stack:

        def begin(settings: dict[str, str], run_bytes: int = MIB) -> Doubt:
            writer, target = (
                stack.enter_context(
                    AgentProgram(tmp_path, name, settings=settings, num_runs=NUM_RUNS, run_bytes=run_bytes)
                )
                for name in ("writer", "target")
            )
            return Doubt(writer, target)

        yield begin


def test_writer_killed_in_the_middle_of_a_copy_is_proven_once_gone_and_then_nothing_changes(
    start: StartDoubt,
) -> None:
    doubt = start({}, run_bytes=4 * MIB)
    doubt.target.send("kill_at_first_byte", value=5, pid=doubt.writer.pid, timeout=20.0)
    doubt.send()
    assert doubt.target.receive()["seen"]
    wait_until(doubt.proven, 10.0, "the writer is gone")
    # Nobody has reaped it yet.
    assert "waits for its parent" in doubt.proof()["story"]
    assert 0 < doubt.landed() < NUM_RUNS * 4 * MIB
    doubt.check_memory_stays()
    doubt.writer.kill()
    doubt.check_memory_stays()


def test_bytes_of_a_dead_writer_land_over_tcp_until_the_proof(start: StartDoubt) -> None:
    """That the writer is gone and reaped is not enough: what it sent lands when the target progresses."""
    doubt = start(TCP)
    doubt.target.ask("listen_alone", listens=False)
    doubt.send()
    doubt.writer.receive()
    assert doubt.writer.ask("poll", timeout=0.5)["state"] == "IN_PROGRESS"
    doubt.writer.kill()
    assert doubt.landed() == 0
    found = doubt.proof()
    assert not found["proven"]
    assert "may still arrive through the socket" in found["story"]
    landed = []
    while not doubt.proven():
        doubt.target.ask("progress", rounds=1)
        landed.append(doubt.landed())
        assert len(landed) < 10_000
    assert landed[-1] > MIB
    assert landed[-1] < NUM_RUNS * MIB
    doubt.check_memory_stays()
    assert doubt.landed() == landed[-1]


@pytest.mark.parametrize("settings", LANES)
def test_stopped_writer_is_never_proven_quiet_and_writes_when_it_goes_on(
    start: StartDoubt, settings: dict[str, str]
) -> None:
    doubt = start(settings)
    doubt.writer.stop()
    doubt.send()
    found = [doubt.proof() for _ in range(50)]
    assert not any(each["proven"] for each in found)
    assert "is there" in doubt.proof()["story"]
    assert doubt.values() == {"0": NUM_RUNS * MIB}
    doubt.writer.go_on()
    doubt.writer.receive()
    assert doubt.writer.ask("poll", timeout=20.0)["state"] == "DONE"
    assert doubt.values() == {"5": NUM_RUNS * MIB}


@pytest.mark.parametrize("settings", LANES)
def test_write_of_a_live_peer_lands_in_deregistered_memory(start: StartDoubt, settings: dict[str, str]) -> None:
    """Taking the memory from the library revokes nothing."""
    doubt = start(settings)
    doubt.target.ask("deregister")
    assert not doubt.proven()
    doubt.send()
    assert "raised" not in doubt.writer.receive()
    assert doubt.writer.ask("poll", timeout=20.0)["state"] == "DONE"
    assert doubt.values() == {"5": NUM_RUNS * MIB}


def test_traffic_of_another_peer_does_not_hold_up_the_proof_and_asking_is_cheap(
    start: StartDoubt, tmp_path: Path
) -> None:
    doubt = start(TCP)
    with AgentProgram(tmp_path, "other", settings=TCP, num_runs=NUM_RUNS, run_bytes=MIB) as other:
        connect(other, doubt.target)
        doubt.writer.kill()
        write(other, doubt.target, 1, [0], [0])
        other.send("measure", peer="target", local=EVERY, remote=EVERY, repeat=1000)
        seconds = []

        def proven() -> bool:
            found = doubt.proof()
            seconds.append(found["seconds"])
            return bool(found["proven"])

        wait_until(proven, 10.0, "the proof holds")
        assert not other.answered()
        assert min(seconds) < PROOF_SECONDS


def test_idle_writer_and_one_whose_pid_another_process_has_are_proven_gone(start: StartDoubt) -> None:
    doubt = start({})
    assert not doubt.proven()
    card = AgentCard.decode("nixl", bytes.fromhex(doubt.metadata))
    assert card.life is not None
    assert card.life.pid == doubt.writer.pid
    earlier = AgentCard(
        card.transport,
        card.agent_name,
        card.regions,
        card.wire,
        card.blob,
        card.life._replace(start_ticks=card.life.start_ticks - 1),
    )
    doubt.metadata = earlier.encode().hex()
    wait_until(doubt.proven, 10.0, "the proof for the earlier process holds")
    doubt.metadata = card.encode().hex()
    assert not doubt.proven()
    doubt.writer.kill()
    wait_until(doubt.proven, 10.0, "the proof for the writer holds")
    assert doubt.values() == {"0": NUM_RUNS * MIB}


@pytest.fixture
def agent() -> Iterator[NixlTransport]:
    transport = NixlTransport("asked")
    yield transport
    transport.close()


@pytest.mark.parametrize("field, value", [("boot", "0" * 36), ("pid_space", "pid:[1]")])
def test_peer_elsewhere_is_never_proven(agent: NixlTransport, field: str, value: str) -> None:
    card = AgentCard.decode("nixl", agent.metadata())
    assert card.life is not None
    life = card.life._replace(start_ticks=0, **{field: value})
    found = agent.quiescence_proof(AgentCard("nixl", "peer", (), "", b"", life).encode())
    assert not found.proven
    assert "another" in found.story


def test_peer_that_tells_no_life_is_never_proven(agent: NixlTransport) -> None:
    found = agent.quiescence_proof(AgentCard("nixl", "peer", ()).encode())
    assert not found.proven
    assert "does not say" in found.story


def test_proof_of_malformed_metadata_raises(agent: NixlTransport) -> None:
    for metadata in (b"", b"\0\0\0\2{}", b"\xff" * 64, AgentCard("loopback", "peer", ()).encode()):
        with pytest.raises(TransportError):
            agent.quiescence_proof(metadata)


def test_closed_agent_still_answers_and_a_living_writer_is_not_proven() -> None:
    """Over cma the writer copies into our memory by itself, whatever became of our agent."""
    agent = NixlTransport("closed")
    metadata = agent.metadata()
    card = AgentCard.decode("nixl", metadata)
    agent.close()
    assert not agent.quiescence_proof(metadata).proven
    assert card.life is not None
    over = AgentCard("nixl", "peer", (), "", b"", card.life._replace(start_ticks=0))
    found = agent.quiescence_proof(over.encode())
    assert found.proven
    assert "our agent is destroyed" in found.story


def test_lanes_over_shared_memory_queues_are_refused_by_the_library(tmp_path: Path) -> None:
    """A message in such a queue would land after its writer's death. The rule for shm holds because there are none."""
    with AgentProgram(tmp_path, "queues", settings={"UCX_TLS": "posix,sysv,self"}) as program:
        program.ended(60.0)
        assert "no peer failure handler" in program.errors()


def test_loopback_is_proven_once_the_peer_is_closed_or_replaced() -> None:
    agents = [LoopbackTransport(name) for name in ("asked", "peer")]
    metadata = agents[1].metadata()
    assert not agents[0].quiescence_proof(metadata).proven
    agents[1].close()
    assert agents[0].quiescence_proof(metadata).proven
    agents[1] = LoopbackTransport("peer")
    assert agents[0].quiescence_proof(metadata).proven
    assert not agents[0].quiescence_proof(agents[1].metadata()).proven
    for agent in agents:
        agent.close()
