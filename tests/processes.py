"""The processes that came out of this one, read from /proc."""

import contextlib
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tests.helpers import wait_until

RUN_VARIABLE = "KVFERRY_TEST_RUN"
"""Environment variable that marks every program started by this test process, also after its parent is gone."""

# The standard library keeps these for the rest of the process's life.
_KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


class Process(NamedTuple):
    """One process; `started` (clock ticks since boot) tells apart two that got the same pid."""

    pid: int
    started: int


class _Stat(NamedTuple):
    process: Process
    parent: int
    state: str


def started_processes() -> set[Process]:
    """Living processes that descend from this one or carry its mark."""
    stats = {stat.process.pid: stat for stat in map(_read_stat, _pids()) if stat is not None and stat.state not in "ZX"}
    found = _descendants(os.getpid(), stats) | {pid for pid in stats if _is_marked(pid)}
    return {stats[pid].process for pid in found - {os.getpid()} if not _is_kept(pid)}


def end(processes: set[Process], grace_s: float) -> dict[Process, str]:
    """Wait for processes to end, kill those that did not, and return the command lines of the killed ones."""
    try:
        wait_until(lambda: not processes & started_processes(), grace_s, "processes end")
    except AssertionError:
        left = processes & started_processes()
        commands = {process: command_line(process.pid) for process in left}
        for process in left:
            _kill(process.pid)
        return commands
    return {}


def command_line(pid: int) -> str:
    """The command a process runs, or the empty string when it is gone."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _read_stat(pid: int) -> _Stat | None:
    # The command, second field, is in parentheses and may hold anything, so fields count from its end.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return _Stat(Process(pid, int(fields[19])), int(fields[1]), fields[0].decode()) if fields else None


def _descendants(root: int, stats: dict[int, _Stat]) -> set[int]:
    children = defaultdict(list)
    for pid, stat in stats.items():
        children[stat.parent].append(pid)
    found: set[int] = set()
    frontier = [root]
    while frontier:
        fresh = children[frontier.pop()]
        found.update(fresh)
        frontier.extend(fresh)
    return found


def _is_marked(pid: int) -> bool:
    mark = f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}".encode()
    return mark in _read(pid, "environ").split(b"\0")


def _is_kept(pid: int) -> bool:
    command = command_line(pid)
    return any(name in command for name in _KEPT)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
