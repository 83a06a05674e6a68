"""Whether a process is gone, asked of real ones."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.transfer.transport import processes
from kvferry.transfer.transport.processes import ProcessLife, gone, own_life, parse_stat
from tests.helpers import wait_until

DIES_WITH_US = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
WAITS = DIES_WITH_US + "print('ready', flush=True)\ninput()"
FIRST_THREAD_ENDS = (
    DIES_WITH_US
    + """
import platform, threading
number = {"x86_64": 60, "aarch64": 93}[platform.machine()]
thread = threading.Thread(target=input)
thread.start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(number, 0)
"""
)


@contextmanager
def running(program: str) -> Iterator[tuple["subprocess.Popen[bytes]", ProcessLife]]:
    own = own_life()
    assert own is not None
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with open(f"/proc/{process.pid}/stat", "rb") as file:
                _, _, start = parse_stat(file.read())
            yield process, own._replace(pid=process.pid, start_ticks=start)
        finally:
            process.kill()


def test_own_life_is_this_process_and_not_gone() -> None:
    own = own_life()
    assert own is not None
    assert own.pid == os.getpid()
    assert ProcessLife.checked(list(own)) == own
    assert not gone(own, own).holds


def test_process_is_gone_when_killed_before_and_after_it_is_reaped() -> None:
    with running(WAITS) as (process, life):
        assert not gone(life, own_life()).holds
        process.kill()
        wait_until(lambda: gone(life, own_life()).holds, 10.0, "a zombie counts as gone")
        assert "waits for its parent" in gone(life, own_life()).story
        process.wait(10.0)
        assert gone(life, own_life()) == (True, f"process {life.pid} is gone")


def test_stopped_process_is_not_gone() -> None:
    with running(WAITS) as (process, life):
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "state T" in gone(life, own_life()).story, 10.0, "the process stops")
        assert not gone(life, own_life()).holds


def test_process_whose_first_thread_ended_is_not_gone_until_the_last_does() -> None:
    with running(FIRST_THREAD_ENDS) as (process, life):
        wait_until(lambda: "state Z" in gone(life, own_life()).story, 10.0, "the first thread ends")
        assert not gone(life, own_life()).holds
        process.kill()
        wait_until(lambda: gone(life, own_life()).holds, 10.0, "the other thread ends too")


def test_pid_taken_by_another_process_is_gone() -> None:
    with running(WAITS) as (_, life):
        found = gone(life._replace(start_ticks=life.start_ticks - 1), own_life())
        assert found == (True, f"process {life.pid} is gone, another one has its pid")


@pytest.mark.parametrize("field", ["boot", "pid_space", "time_space"])
def test_process_elsewhere_is_never_gone(field: str) -> None:
    own = own_life()
    assert own is not None
    elsewhere = own._replace(pid=processes.MAX_PID, start_ticks=0)
    assert gone(elsewhere, own).holds
    other = {"boot": "0" * 36, "pid_space": "pid:[1]", "time_space": "time:[1]"}[field]
    found = gone(elsewhere._replace(**{field: other}), own)
    assert not found.holds
    assert "another" in found.story


def test_nothing_is_known_of_a_peer_without_a_life_or_by_one_without() -> None:
    assert not gone(None, own_life()).holds
    assert not gone(own_life(), None).holds


@pytest.mark.parametrize(
    "text", [b"", b"1", b"1 (a) R", b"1 (a) RR" + b" 0" * 30, b"1 (a) R" + b" x" * 30, b"\xff" * 100]
)
def test_parse_stat_of_other_text_raises(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_stat(text)


def test_parse_stat_with_a_name_like_a_state() -> None:
    fields = [b"S", *(b"%d" % number for number in range(4, 30))]
    assert parse_stat(b"7 (a) Z 1 ) " + b" ".join(fields)) == (b"S", 20, 22)


def test_odd_proc_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(_: bytes) -> tuple[bytes, int, int]:
        raise ValueError("odd")

    own = own_life()
    monkeypatch.setattr(processes, "parse_stat", odd)
    found = gone(own, own)
    assert not found.holds
    assert "cannot be looked at" in found.story
    assert own_life() is None
