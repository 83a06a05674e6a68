"""Which life of which process an agent lives in, and whether that life is over.

What a peer claims about its process is used for nothing but to look for it on this machine.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from kvferry.transfer.transport.quiescence import Fact

MAX_PID = 1 << 22
"""No Linux kernel has higher ones."""

_BOOT = re.compile(r"[0-9a-f-]{36}")
_NAMESPACE = re.compile(r"[a-z]{1,16}:\[\d{1,20}\]")
_DEAD_STATES = (b"Z", b"X", b"x")


class ProcessLife(NamedTuple):
    """One process from its start to its end: a pid that is taken again has another start.

    Attributes:
        boot: of the machine's kernel.
        pid_space: namespace of `pid`; net_space: of its sockets; time_space: of `start_ticks`.
        start_ticks: clock ticks from boot to its start.
    """

    boot: str
    pid_space: str
    net_space: str
    time_space: str
    pid: int
    start_ticks: int

    @classmethod
    def checked(cls, value: object) -> "ProcessLife":
        """Read a list that came from a peer. Raises ValueError unless it has the form of a life."""
        match value:
            case [str(boot), str(pid_space), str(net_space), str(time_space), int(pid), int(start)] if (
                _BOOT.fullmatch(boot)
                and all(map(_NAMESPACE.fullmatch, (pid_space, net_space, time_space)))
                and not isinstance(pid, bool)
                and 0 < pid <= MAX_PID
                and 0 <= start < 1 << 63
            ):
                return cls(boot, pid_space, net_space, time_space, pid, start)
        raise ValueError(f"process {value!r:.200}")


def own_life() -> ProcessLife | None:
    """The life of this process; None where /proc does not show it as the kernel calls it."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "time")]
        _, _, start = parse_stat(Path("/proc/self/stat").read_bytes())
        return ProcessLife.checked([boot, *spaces, os.getpid(), start])
    except (OSError, ValueError):
        return None


def gone(life: ProcessLife | None, own: ProcessLife | None) -> Fact:
    """Whether no thread of that process runs or will run again. A stopped process is not gone.

    Args:
        own: the life of this process, as `own_life` said.
    """
    if life is None:
        return Fact(False, "the peer does not say which process it is")
    if own is None:
        return Fact(False, "/proc does not show this process as the kernel calls it")
    for what, theirs, ours in zip(("machine or boot", "pid namespace"), life[:2], own[:2], strict=True):
        if theirs != ours:
            return Fact(False, f"the peer is in another {what}: from here its end cannot be seen")
    if life.time_space != own.time_space:
        return Fact(False, "the peer is in another time namespace: its start cannot be compared")
    try:
        return _gone(life)
    except (OSError, ValueError) as error:
        return Fact(False, f"process {life.pid} cannot be looked at: {error!r:.200}")


def _gone(life: ProcessLife) -> Fact:
    if not _exists(life.pid):
        return Fact(True, f"process {life.pid} is gone")
    state, num_threads, start = parse_stat(Path(f"/proc/{life.pid}/stat").read_bytes())
    if start != life.start_ticks:
        return Fact(True, f"process {life.pid} is gone, another one has its pid")
    # The first thread can have ended before others. Once it has, it starts none, so a count of one is final.
    if state in _DEAD_STATES and num_threads <= 1:
        return Fact(True, f"process {life.pid} has ended and waits for its parent")
    return Fact(False, f"process {life.pid} is there (state {state.decode()}, {num_threads} threads)")


def _exists(pid: int) -> bool:
    """Asks the kernel, since /proc may be mounted so that it hides the processes of others."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def parse_stat(text: bytes) -> tuple[bytes, int, int]:
    """State, number of threads and start from a /proc/<pid>/stat. Raises ValueError for anything else."""
    # The name before is in parentheses and may hold spaces and parentheses of its own.
    fields = text.rpartition(b")")[2].split()
    if len(fields) < 20 or len(fields[0]) != 1:
        raise ValueError(f"not the state of a process: {text!r:.100}")
    return fields[0], int(fields[17]), int(fields[19])
