"""NIXL between two processes: the lane, what moves, and what happens when the other one stops, dies or comes back."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.transport_contract.agent_programs import AgentProgram, connect, read, write

LANES = [pytest.param({}, "cma", id="default"), pytest.param({"UCX_TLS": "tcp"}, "tcp", id="tcp")]
MIB = 1 << 20

StartPair = Callable[..., tuple[AgentProgram, AgentProgram]]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def start_pair(tmp_path: Path) -> Iterator[StartPair]:
    """Starts a writer and a target and connects them."""
    with ExitStack() as stack:

        def start(settings: dict[str, str], **options: int | bool) -> tuple[AgentProgram, AgentProgram]:
            writer, target = (
                stack.enter_context(AgentProgram(tmp_path, name, settings=settings, **options))  # type: ignore[arg-type]
                for name in ("writer", "target")
            )
            connect(writer, target)
            return writer, target

        yield start


def hear(target: AgentProgram, count: int = 1) -> list[dict[str, object]]:
    """The notifications of a target, once it has that many."""
    heard: list[dict[str, object]] = []

    def enough() -> bool:
        heard.extend(target.ask("listened")["heard"])
        return len(heard) >= count

    wait_until(enough, 10.0, f"{target.agent_name} hears {count} notifications")
    return heard


def scattered(count: int, of: int, seed: int) -> list[int]:
    """Indices of which no two neighbours are consecutive."""
    return random.Random(seed).sample(range(0, of, 2), count)


@pytest.mark.parametrize("settings, lane", LANES)
def test_write_reports_lane_bytes_and_descriptors_and_notifies_after_data(
    start_pair: StartPair, settings: dict[str, str], lane: str
) -> None:
    writer, target = start_pair(settings, telemetry=True)
    sequential = list(range(64))
    ended = write(writer, target, 1, sequential, sequential)
    assert (ended["num_descriptors"], ended["num_bytes"]) == (1, 64 * 65536)
    # Heard, and so checked, before the next write: that one goes over half of the same runs.
    assert hear(target) == [{"peer": "writer", "seed": 1, "right": True}]
    local, remote = scattered(64, 128, 1), scattered(64, 128, 2)
    ended = write(writer, target, 2, local, remote)
    assert (ended["num_descriptors"], ended["num_bytes"]) == (64, 64 * 65536)
    assert hear(target) == [{"peer": "writer", "seed": 2, "right": True}]
    assert writer.ask("lane", peer="target")["lane"] == lane


@pytest.mark.parametrize("settings, lane", LANES)
def test_read_reports_lane_bytes_and_descriptors_and_notifies_the_owner_after_data(
    start_pair: StartPair, settings: dict[str, str], lane: str
) -> None:
    reader, owner = start_pair(settings, telemetry=True)
    local, remote = scattered(64, 128, 1), scattered(64, 128, 2)
    for seed, (ours, theirs, num_descriptors) in enumerate([(range(64), range(64), 1), (local, remote, 64)]):
        reader.ask("set_all", value=255)
        ended = read(reader, owner, seed, list(ours), list(theirs))
        assert (ended["num_descriptors"], ended["num_bytes"]) == (num_descriptors, 64 * 65536)
        assert hear(owner) == [{"peer": "writer", "seed": seed}]
        assert reader.ask("right", seed=seed, local=list(ours), remote=list(theirs))["right"]
        assert reader.ask("values")["values"]["255"] == 64 * 65536
    assert reader.ask("lane", peer="target")["lane"] == lane


@pytest.mark.parametrize("settings, lane", LANES)
def test_read_of_a_stopped_owner_waits_or_ends_and_fails_when_it_dies(
    start_pair: StartPair, settings: dict[str, str], lane: str
) -> None:
    """Over cma a read needs nothing of the owner but its memory. Its notification waits."""
    reader, owner = start_pair(settings)
    read(reader, owner, 1, [0], [0])
    owner.stop()
    every = list(range(128))
    assert reader.ask("post", peer="target", seed=1, local=every, remote=every, operation="READ")["seconds"] < 2.0
    assert reader.ask("poll", timeout=0.2)["state"] == "IN_PROGRESS"
    assert reader.ask("right", seed=1, local=every, remote=every)["right"] == (lane == "cma")
    owner.kill()
    assert reader.ask("poll", timeout=10.0)["state"] == "FAILED"
    again = reader.ask("post", peer="target", seed=1, local=[0], remote=[0], operation="READ")
    assert again["raised"] == "PEER_LOST"


def test_computed_descriptor_count_is_the_librarys(start_pair: StartPair, tmp_path: Path) -> None:
    writer, target = start_pair({}, run_bytes=4096)
    with AgentProgram(tmp_path, "counting", run_bytes=4096, telemetry=True) as counting:
        connect(counting, target)
        for seed in range(8):
            draw = random.Random(seed)
            start, length = draw.randrange(64), draw.randrange(1, 64)
            local = [*range(start, start + length), *scattered(8, 128, seed)]
            remote = [*range(length), *scattered(8, 128, seed + 100)]
            computed = write(writer, target, seed, local, remote)
            assert write(counting, target, seed, local, remote)["num_descriptors"] == computed["num_descriptors"]


def test_lane_is_unknown_before_a_write_and_told_apart_per_peer(tmp_path: Path) -> None:
    with (
        AgentProgram(tmp_path, "writer") as writer,
        AgentProgram(tmp_path, "near") as near,
        AgentProgram(tmp_path, "far", settings={"UCX_TLS": "tcp"}) as far,
        AgentProgram(tmp_path, "near-too") as near_too,
    ):
        for target in (near, far, near_too):
            assert connect(writer, target)["lane"] == "unknown"
            write(writer, target, 1, [0], [0])
        lanes = [writer.ask("lane", peer=target.agent_name)["lane"] for target in (near, far, near_too)]
        assert lanes == ["cma", "tcp", "cma"]


@pytest.mark.parametrize("settings, lane", LANES)
def test_target_killed_during_write_fails_it_and_refuses_later_posts(
    start_pair: StartPair, settings: dict[str, str], lane: str
) -> None:
    writer, target = start_pair(settings)
    write(writer, target, 1, [0], [0])
    target.stop()
    every = list(range(128))
    writer.ask("post", peer="target", seed=1, local=every, remote=every)
    assert writer.ask("poll", timeout=0.2)["state"] == "IN_PROGRESS"
    target.kill()
    ended = writer.ask("poll", timeout=10.0)
    assert ended["state"] == "FAILED"
    assert ended["seconds"] < 5.0
    assert "disconnected" in ended["text"]
    assert writer.ask("release")["released"] is True
    again = writer.ask("post", peer="target", seed=1, local=[0], remote=[0])
    assert again["raised"] == "PEER_LOST"
    assert writer.ask("disconnect", peer="target") == {}
    assert writer.ask("close", timeout_s=10.0)["seconds"] < 5.0


@pytest.mark.parametrize("settings, lane", LANES)
def test_target_killed_between_writes_fails_the_next(
    start_pair: StartPair, settings: dict[str, str], lane: str
) -> None:
    writer, target = start_pair(settings)
    write(writer, target, 1, [0], [0])
    target.kill()
    answer = writer.ask("post", peer="target", seed=1, local=[0], remote=[0])
    if "raised" not in answer:
        assert writer.ask("poll", timeout=10.0)["state"] == "FAILED"
        answer = writer.ask("post", peer="target", seed=1, local=[0], remote=[0])
    assert answer["raised"] == "PEER_LOST"


@pytest.mark.parametrize("settings, lane", LANES)
def test_stopped_target_never_blocks_and_a_write_under_way_cannot_be_released(
    start_pair: StartPair, settings: dict[str, str], lane: str
) -> None:
    """The library would say that it let go, and go on reading: what lands must be what was there at the post."""
    writer, target = start_pair(settings, num_runs=32, run_bytes=MIB)
    write(writer, target, 1, [0], [0])
    hear(target)
    writer.ask("set_all", value=5)
    target.stop()
    every = list(range(32))
    assert writer.ask("post", peer="target", seed=1, local=every, remote=every)["seconds"] < 2.0
    assert writer.ask("poll", timeout=0.2)["state"] == "IN_PROGRESS"
    assert writer.ask("release")["released"] is False
    target.go_on()
    assert writer.ask("poll", timeout=10.0)["state"] == "DONE"
    assert writer.ask("release")["released"] is True
    assert target.ask("values")["values"] == {"5": 32 * MIB}


def test_disconnect_during_write_lets_it_end_first(start_pair: StartPair) -> None:
    writer, target = start_pair({"UCX_TLS": "tcp"}, num_runs=32, run_bytes=MIB)
    write(writer, target, 1, [0], [0])
    hear(target)
    writer.ask("set_all", value=5)
    described = target.ask("describe")
    target.stop()
    every = list(range(32))
    writer.ask("post", peer="target", seed=1, local=every, remote=every)
    assert writer.ask("disconnect", peer="target") == {}
    assert writer.ask("connect", **described)["raised"] == "IN_USE"
    assert writer.ask("poll", timeout=0.1)["state"] == "IN_PROGRESS"
    target.go_on()
    assert writer.ask("poll", timeout=10.0)["state"] == "DONE"
    assert target.ask("values")["values"] == {"5": 32 * MIB}
    assert writer.ask("connect", **described)["peer"] == "target"
    write(writer, target, 3, [1], [1])


def test_close_during_write_ends_quickly_and_reads_the_source_no_more(start_pair: StartPair) -> None:
    writer, target = start_pair({"UCX_TLS": "tcp"}, num_runs=32, run_bytes=MIB)
    write(writer, target, 1, [0], [0])
    hear(target)
    writer.ask("set_all", value=5)
    target.ask("set_all", value=0)
    target.stop()
    every = list(range(32))
    writer.ask("post", peer="target", seed=1, local=every, remote=every)
    assert writer.ask("close", timeout_s=10.0)["seconds"] < 5.0
    target.go_on()
    assert target.ask("values")["values"].keys() <= {"0", "5"}


@pytest.mark.parametrize("settings, lane", LANES)
def test_connect_to_dead_agent_fails_it_or_its_first_write_and_leaves_others_alone(
    start_pair: StartPair, tmp_path: Path, settings: dict[str, str], lane: str
) -> None:
    writer, target = start_pair(settings)
    with AgentProgram(tmp_path, "dead", settings=settings) as dead:
        described = dead.ask("describe", timeout_s=60.0)
        dead.kill()
    answer = writer.ask("connect", **described)
    if "raised" not in answer:
        assert answer["seconds"] < 1.0
        writer.ask("post", peer="dead", seed=1, local=[0], remote=[0])
        answer = writer.ask("poll", timeout=10.0)
        assert answer["state"] == "FAILED"
    assert "dead" in answer["text"]
    write(writer, target, 1, [0], [0])


def test_process_exits_cleanly_when_its_input_ends(start_pair: StartPair) -> None:
    writer, target = start_pair({})
    write(writer, target, 1, [0], [0])
    assert [writer.end(), target.end()] == [0, 0]
    assert writer.errors() == ""
