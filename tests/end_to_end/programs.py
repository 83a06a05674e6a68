"""The `kvferry` command as a user runs it."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RUN_SECONDS = 90.0


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]


def start(*arguments: str, environ: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start `kvferry ARGUMENTS` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvferry", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
        process_group=0,
    )


def finish(process: "subprocess.Popen[str]", timeout_s: float = RUN_SECONDS) -> Ended:
    """Wait for a command; one that does not end in time is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not ended after {timeout_s} s: {out} {err}") from None
    return Ended(process.returncode, out, err)


def run(*arguments: str, environ: Mapping[str, str] | None = None) -> Ended:
    """Run `kvferry ARGUMENTS` to its end."""
    return finish(start(*arguments, environ=environ))


def shared_memory() -> set[str]:
    """Segments that exist on this machine now."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}
