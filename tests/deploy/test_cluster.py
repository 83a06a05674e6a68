"""Clusters of small programs that stand for kvferry's own: who is stopped when, and how."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cache.errors import DeadlineExceeded, LocalProtocolError, Unavailable
from kvferry.deploy.cluster import Cluster, stop_well
from tests.helpers import wait_until

PROGRAM = """
import os, pathlib, signal, sys, tempfile, time
import yaml

kind, config_file, endpoint_file = sys.argv[1], sys.argv[3], sys.argv[5]
config = yaml.safe_load(pathlib.Path(config_file).read_text())

def note(what):
    with open(config["journal"], "a") as journal:
        journal.write(f"{what} {pathlib.Path(config_file).stem}\\n")

def on_term(number, frame):
    note("stops")
    if config.get("interrupts"):
        os.kill(os.getppid(), signal.SIGINT)
    if not config.get("stays"):
        note("ends")
        os._exit(config.get("code", 0))

signal.signal(signal.SIGTERM, on_term)
variables = sorted(name for name in os.environ if name.startswith("KVFERRY_") and "__" in name)
pathlib.Path(config_file).with_suffix(".variables").write_text(" ".join(variables))
if not config.get("mute"):
    pathlib.Path(endpoint_file).write_text("127.0.0.1:1")
if config.get("litters"):
    tempfile.mkdtemp()
print("some last words", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, program=(sys.executable, "-c", PROGRAM))
    yield cluster
    cluster.stop_seconds = 0.0
    cluster.stop()


def start(cluster: Cluster, kind: str, name: str, **config: object) -> None:
    child = cluster.start(kind, name, {"journal": str(cluster.folder / "journal"), **config})
    cluster.wait_endpoint(child, 20.0)


def journal(cluster: Cluster) -> list[str]:
    path = cluster.folder / "journal"
    return path.read_text().splitlines() if path.exists() else []


def test_stop_ends_the_workers_before_the_frontend(cluster: Cluster) -> None:
    start(cluster, "frontend", "f")
    start(cluster, "worker", "w0")
    start(cluster, "worker", "w1")
    assert cluster.stop() == {"w1": 0, "w0": 0, "f": 0}
    assert set(journal(cluster)[:4]) == {"stops w0", "ends w0", "stops w1", "ends w1"}
    assert journal(cluster)[4:] == ["stops f", "ends f"]


def test_stop_again_does_nothing(cluster: Cluster) -> None:
    start(cluster, "worker", "w0")
    cluster.stop()
    assert cluster.stop() == {}
    assert journal(cluster) == ["stops w0", "ends w0"]


def test_stop_kills_who_is_late_and_still_stops_the_frontend_well(cluster: Cluster) -> None:
    start(cluster, "frontend", "f")
    start(cluster, "worker", "w0", stays=True)
    cluster.stop_seconds = 4.0
    assert cluster.stop() == {"w0": -signal.SIGKILL, "f": 0}
    assert journal(cluster) == ["stops w0", "stops f", "ends f"]


def test_stop_tells_who_had_ended_before(cluster: Cluster) -> None:
    start(cluster, "worker", "w0")
    cluster.children[0].process.kill()
    cluster.children[0].process.wait(10.0)
    with pytest.raises(Unavailable, match="w0: it was killed, or did not stop in time: some last words"):
        stop_well(cluster)


def test_stop_well_names_an_exit_code_that_is_not_zero(cluster: Cluster) -> None:
    start(cluster, "worker", "w0", code=2)
    with pytest.raises(Unavailable, match="w0: it ended with exit code 2 when stopped: some last words"):
        stop_well(cluster)


def test_interrupt_during_stop_kills_at_once(cluster: Cluster) -> None:
    start(cluster, "frontend", "f", stays=True)
    start(cluster, "worker", "w0", stays=True, interrupts=True)
    processes = [child.process for child in cluster.children]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    assert time.monotonic() - started < 5.0
    assert journal(cluster) == ["stops w0"]


def test_environment_sets_only_what_the_configuration_leaves_open(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROLE", "POOLS__QUOTA_BYTES", "POOLS__SLOT_ORDER", "NUM_THREADS"):
        monkeypatch.setenv(f"KVFERRY_WORKER__{name}", "1")
    monkeypatch.setenv("KVFERRY_FRONTEND__ROLE", "1")
    start(cluster, "worker", "w0", role="decode", pools={"quota_bytes": 5}, num_threads=None)
    passed = ["FRONTEND__ROLE", "WORKER__NUM_THREADS", "WORKER__POOLS__SLOT_ORDER"]
    assert (cluster.folder / "w0.variables").read_text().split() == [f"KVFERRY_{name}" for name in passed]


def test_child_that_is_late_is_named_once(cluster: Cluster) -> None:
    child = cluster.start("worker", "w0", {"journal": "/", "mute": True})
    with pytest.raises(DeadlineExceeded, match=r"^w0: does not serve after 0 s: "):
        cluster.wait_endpoint(child, 0.0)


def test_what_a_killed_child_leaves_behind_is_in_the_folder_of_the_cluster(cluster: Cluster) -> None:
    start(cluster, "worker", "w", litters=True)
    cluster.stop_seconds = 0.0
    cluster.stop()
    assert len([entry for entry in cluster.folder.iterdir() if entry.is_dir()]) == 1


def test_start_from_a_thread_that_may_end_is_refused(cluster: Cluster) -> None:
    refused: list[str] = []

    def start_there() -> None:
        try:
            cluster.start("worker", "w0", {})
        except LocalProtocolError as error:
            refused.append(str(error))

    thread = threading.Thread(target=start_there)
    thread.start()
    thread.join(10.0)
    assert refused == ["w0 would be killed with the thread that starts it: use the main thread"]
    assert cluster.children == []


def test_child_that_ends_while_starting_is_told_with_its_last_words(cluster: Cluster) -> None:
    child = cluster.start("worker", "w0", {"journal": "/"})
    wait_until(lambda: child.endpoint, 20.0, "the child runs")
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait(10.0)
    with pytest.raises(Unavailable, match=r"^w0: ended with exit code -9: some last words$"):
        cluster.check_alive()
