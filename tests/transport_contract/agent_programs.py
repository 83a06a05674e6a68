"""Starts agents in processes of their own and talks to them."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = Path(__file__).with_name("agent_process.py")
START_SECONDS = 60.0
ANSWER_SECONDS = 30.0
END_SECONDS = 10.0


class AgentProgram:
    """One running agent process. As a context manager it ends the process in any case."""

    def __init__(
        self,
        folder: Path,
        agent_name: str,
        *,
        num_runs: int = 128,
        run_bytes: int = 65536,
        telemetry: bool = False,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.agent_name = agent_name
        self._errors = (folder / f"{agent_name}.stderr").open("w+")
        arguments = {
            "agent_name": agent_name,
            "num_runs": num_runs,
            "run_bytes": run_bytes,
            "telemetry": telemetry,
            "log_path": str(folder / f"{agent_name}.ucx.log"),
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=clean | (settings or {}),
        )
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "AgentProgram":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._errors.close()

    def send(self, do: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float = ANSWER_SECONDS) -> dict[str, Any]:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            read = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            assert read, f"{self.agent_name} did not answer within {timeout_s} s, or ended: {self.errors()}"
            self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def answered(self) -> bool:
        """Whether an answer is there to be received."""
        return bool(select.select([self._process.stdout], [], [], 0.0)[0])

    def ask(self, do: str, *, timeout_s: float = ANSWER_SECONDS, **arguments: object) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.receive(timeout_s)

    def errors(self) -> str:
        self._errors.flush()
        return Path(self._errors.name).read_text()[-2000:]

    def stop(self) -> None:
        """Stop the process where it is, without ending it."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(END_SECONDS)

    def ended(self, timeout_s: float = END_SECONDS) -> int:
        """Wait until it ends by itself. Returns the exit status."""
        return self._process.wait(timeout_s)

    def end(self) -> int:
        """End its input and wait. Returns the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(END_SECONDS)


def connect(writer: AgentProgram, target: AgentProgram) -> dict[str, Any]:
    """Connect two programs that may still be starting. Returns the writer's answer."""
    target.send("describe")
    writer.send("describe")
    writer.receive(START_SECONDS)
    described = target.receive(START_SECONDS)
    return writer.ask("connect", **described)


def write(writer: AgentProgram, target: AgentProgram, seed: int, local: list[int], remote: list[int]) -> dict[str, Any]:
    """A whole write, with the source filled before. Returns the writer's last answer, which must say DONE."""
    writer.ask("fill", seed=seed)
    return _finish(writer, target, seed, local, remote, "WRITE")


def read(reader: AgentProgram, owner: AgentProgram, seed: int, local: list[int], remote: list[int]) -> dict[str, Any]:
    """A whole read, with the source filled before. Returns the reader's last answer, which must say DONE."""
    owner.ask("fill", seed=seed)
    return _finish(reader, owner, seed, local, remote, "READ")


def _finish(
    poster: AgentProgram, peer: AgentProgram, seed: int, local: list[int], remote: list[int], operation: str
) -> dict[str, Any]:
    posted = poster.ask("post", peer=peer.agent_name, seed=seed, local=local, remote=remote, operation=operation)
    assert "raised" not in posted, posted
    ended = poster.ask("poll", timeout=20.0)
    assert ended["state"] == "DONE", ended
    return ended
