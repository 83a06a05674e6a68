"""A frontend and workers as child processes of this one, on this machine.

Children are killed when the thread that started them ends (`deploy.process.die_with_parent`), so they must be started
from a thread that lives as long as they should: only the main thread may start them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvferry.cache.errors import DeadlineExceeded, LocalProtocolError, Unavailable
from kvferry.deploy.config import FrontendConfig, WorkerConfig, without_keys
from kvferry.deploy.process import PARENT_VARIABLE, signals_deferred

STOP_SECONDS = 20.0
WORKERS_SHARE = 0.75
"""The part of the time to stop that workers may use; the rest is the frontend's."""

KILL_SECONDS = 5.0
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 5
ENV_PREFIXES = {"worker": WorkerConfig.env_prefix, "frontend": FrontendConfig.env_prefix}


@dataclass
class Child:
    """One kvferry process: what it is, where it says its address, where it logs."""

    kind: str
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
            raise Unavailable(f"ended with exit code {code}: {self.last_words()}", peer=self.name)

    def last_words(self) -> str:
        """The last error line of its log, or its last lines where there is none."""
        lines = [line for line in self.log_file.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("kvferry: error:")]
        return errors[-1].removeprefix("kvferry: error: ") if errors else " | ".join(lines[-LOG_TAIL_LINES:])


@dataclass
class Cluster:
    """Children in the order they were started; workers are stopped before the frontend they talk to.

    Concurrency: the main thread.
    """

    folder: Path
    children: list[Child] = field(default_factory=list)
    program: Sequence[str] = (sys.executable, "-m", "kvferry")
    stop_seconds: float = STOP_SECONDS

    def start(self, kind: str, name: str, config: Mapping[str, Any]) -> Child:
        """Start `kvferry <kind>` with this configuration. Returns at once.

        Environment variables set what the configuration leaves open, and nothing that it says.

        Raises: LocalProtocolError: called by a thread that may end, and the child with it, before the process does.
        """
        if threading.current_thread() is not threading.main_thread():
            raise LocalProtocolError(f"{name} would be killed with the thread that starts it: use the main thread")
        config_file = self.folder / f"{name}.yaml"
        config_file.write_text(yaml.safe_dump(dict(config)))
        endpoint_file, log_file = self.folder / f"{name}.endpoint", self.folder / f"{name}.log"
        # An address from an earlier child of this name would be taken for the new one's.
        endpoint_file.unlink(missing_ok=True)
        command = [*self.program, kind, "--config", str(config_file), "--endpoint-file", str(endpoint_file)]
        # Ctrl-C between the start of a child and its entry in the list would leave it behind.
        with log_file.open("wb") as log, signals_deferred():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **without_keys(ENV_PREFIXES[kind], config, os.environ),
                    PARENT_VARIABLE: str(os.getpid()),
                    # What a child that is killed leaves behind goes with the cluster's folder.
                    "TMPDIR": str(self.folder),
                },
                # A group of its own: Ctrl-C reaches only this process, which then stops its children in order.
                process_group=0,
            )
            child = Child(kind, name, process, endpoint_file, log_file)
            self.children.append(child)
        return child

    def wait_endpoint(self, child: Child, timeout_seconds: float) -> str:
        """Wait until a child serves. Raises Unavailable when any child ended, DeadlineExceeded when late."""
        deadline = time.monotonic() + timeout_seconds
        while child.endpoint is None:
            self.check_alive()
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"does not serve after {timeout_seconds:g} s: {child.last_words()}", peer=child.name
                )
            time.sleep(POLL_SECONDS)
        return child.endpoint

    def check_alive(self) -> None:
        """Raise Unavailable when any child ended."""
        for child in self.children:
            child.check_alive()

    def stop(self) -> dict[str, int]:
        """End all children: the workers together, then the frontend, each by SIGTERM and, when late, by SIGKILL.

        Idempotent. A KeyboardInterrupt meanwhile kills what is left at once.
        Returns: exit codes by name; -9 where somebody had to be killed.
        """
        started = time.monotonic()
        workers = [child for child in reversed(self.children) if child.kind == "worker"]
        others = [child for child in reversed(self.children) if child.kind != "worker"]
        try:
            _end(workers, started + self.stop_seconds * WORKERS_SHARE)
            _end(others, started + self.stop_seconds)
        finally:
            codes = {child.name: _killed(child) for child in (*workers, *others)}
            self.children.clear()
        return codes


def _end(children: Sequence[Child], deadline: float) -> None:
    """SIGTERM to all; returns when all ended or the deadline passed."""
    for child in children:
        child.process.send_signal(signal.SIGTERM)
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))


def _killed(child: Child) -> int:
    """The exit code of a child that ended or ends now."""
    child.process.kill()
    return child.process.wait(KILL_SECONDS)


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster in a temporary folder; whatever happens, its children end with the context.

    Raises: Unavailable: the context ended well, but some child did not.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        cluster = Cluster(Path(folder))
        try:
            yield cluster
        except BaseException:
            cluster.stop()
            raise
        stop_well(cluster)


def stop_well(cluster: Cluster) -> None:
    """Stop. Raises Unavailable, with the end of its log, for the first child that was killed or ended with an error."""
    children = list(cluster.children)
    codes = cluster.stop()
    for child in children:
        if codes[child.name] == -signal.SIGKILL:
            raise Unavailable(f"it was killed, or did not stop in time: {child.last_words()}", peer=child.name)
        if codes[child.name] != 0:
            text = f"it ended with exit code {codes[child.name]} when stopped: {child.last_words()}"
            raise Unavailable(text, peer=child.name)


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
