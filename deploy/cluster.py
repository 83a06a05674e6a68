"""A frontend and workers as child processes of this one, on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvferry.cache.errors import DeadlineExceeded, Unavailable
from kvferry.deploy.process import PARENT_VARIABLE

STOP_SECONDS = 15.0
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 5


@dataclass
class Child:
    """One kvferry process: its command, where it says its address, where it logs."""

    name: str
    process: "subprocess.Popen[bytes]"
    endpoint_file: Path
    log_file: Path

    @property
    def endpoint(self) -> str | None:
        """HOST:PORT once it serves."""
        return self.endpoint_file.read_text().strip() if self.endpoint_file.exists() else None

    def check_alive(self) -> None:
        """Raise Unavailable, with the end of its log, when the process ended."""
        code = self.process.poll()
        if code is not None:
            raise Unavailable(f"{self.name} ended with exit code {code}: {self.last_words()}", peer=self.name)

    def last_words(self) -> str:
        """The last error line of its log, or its last lines where there is none."""
        lines = [line for line in self.log_file.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("kvferry: error:")]
        return errors[-1].removeprefix("kvferry: error: ") if errors else " | ".join(lines[-LOG_TAIL_LINES:])


@dataclass
class Cluster:
    """Children in the order they were started; stopped in reverse."""

    folder: Path
    children: list[Child] = field(default_factory=list)

    def start(self, kind: str, name: str, config: Mapping[str, Any]) -> Child:
        """Start `kvferry <kind>` with this configuration. Returns at once."""
        config_file = self.folder / f"{name}.yaml"
        config_file.write_text(yaml.safe_dump(dict(config)))
        endpoint_file, log_file = self.folder / f"{name}.endpoint", self.folder / f"{name}.log"
        command = [sys.executable, "-m", "kvferry", kind, "--config", str(config_file)]
        command += ["--endpoint-file", str(endpoint_file)]
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                # A group of its own: Ctrl-C reaches only this process, which then stops its children in order.
                process_group=0,
            )
        child = Child(name, process, endpoint_file, log_file)
        self.children.append(child)
        return child

    def wait_endpoint(self, child: Child, timeout_seconds: float) -> str:
        """Wait until a child serves. Raises Unavailable when any child ended, DeadlineExceeded when late."""
        deadline = time.monotonic() + timeout_seconds
        while child.endpoint is None:
            self.check_alive()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"{child.name} does not serve after {timeout_seconds:g} s: {child.last_words()}", peer=child.name
                )
            time.sleep(POLL_SECONDS)
        return child.endpoint

    def check_alive(self) -> None:
        """Raise Unavailable when any child ended."""
        for child in self.children:
            child.check_alive()

    def stop(self) -> list[str]:
        """End all children, last started first: SIGTERM, then SIGKILL. Returns the names of those that were killed."""
        for child in reversed(self.children):
            child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        killed = [child.name for child in reversed(self.children) if not _ended(child, deadline)]
        self.children.clear()
        return killed


def _ended(child: Child, deadline: float) -> bool:
    """Wait for a child's end; kill it at the deadline."""
    try:
        child.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.process.kill()
        child.process.wait(STOP_SECONDS)
        return False
    return True


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster in a temporary folder; whatever happens, its children end with the context."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        cluster = Cluster(Path(folder))
        try:
            yield cluster
        finally:
            cluster.stop()


def start_cluster(
    cluster: Cluster, *, num_prefill: int, num_decode: int, worker: Mapping[str, Any], timeout_seconds: float
) -> str:
    """Start a frontend and workers and wait until all of them serve. Returns the frontend's HOST:PORT.

    Args:
        worker: configuration shared by the workers, without role, name and directory.
    """
    deadline = time.monotonic() + timeout_seconds
    frontend = cluster.start("frontend", "frontend", {"listen": "127.0.0.1:0"})
    directory = cluster.wait_endpoint(frontend, timeout_seconds)
    names = [("prefill", f"prefill-{i}") for i in range(num_prefill)]
    names += [("decode", f"decode-{i}") for i in range(num_decode)]
    workers = [
        cluster.start("worker", name, {**worker, "role": role, "name": name, "directory": directory})
        for role, name in names
    ]
    for child in workers:
        cluster.wait_endpoint(child, max(0.1, deadline - time.monotonic()))
    return directory
