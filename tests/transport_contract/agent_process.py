"""A program with one NIXL agent and one region, told what to do by JSON lines on its standard input.

It ends when its input ends, and the kernel kills it when its parent dies. Between commands it reads notifications all
the time; when one comes it checks at once that every byte the notification announces is there.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.base import DescriptorList, Operation, Post, PostState
from kvferry.transfer.transport.lanes import prepare_environment
from kvferry.transfer.transport.registry import create

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.0002


def pattern(seed: int, run: int, num_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """What the writer puts into a run. Differs between runs and seeds."""
    return ((np.arange(num_bytes, dtype=np.uint32) * 31 + run * 17 + seed * 7919) % 251).astype(np.uint8)


class AgentProcess:
    """The agent, its memory and the write under way."""

    def __init__(self, agent_name: str, num_runs: int, run_bytes: int, log_path: Path, telemetry: bool) -> None:
        log = prepare_environment(os.environ, log_path)
        self.transport = create("nixl", agent_name, log_path=log, telemetry=telemetry)
        self.num_runs, self.run_bytes = num_runs, run_bytes
        self.memory = torch.zeros(num_runs * run_bytes, dtype=torch.uint8)
        self.transport.register([self.memory])
        self.lists: dict[str, tuple[DescriptorList, DescriptorList]] = {}
        self.posts: list[Post] = []
        self.heard: list[dict[str, Any]] = []
        self.listens = True

    def run(self, index: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        return self.memory.numpy()[index * self.run_bytes : (index + 1) * self.run_bytes]

    def runs_from(self, address: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        rows = np.zeros((self.num_runs, 3), np.uint64)
        rows[:, 0] = address + np.arange(self.num_runs) * self.run_bytes
        rows[:, 1] = self.run_bytes
        return rows

    def listen(self) -> None:
        for notification in self.transport.notifications():
            told = json.loads(notification.payload)
            if told["operation"] == "READ":
                self.heard.append({"peer": notification.peer, "seed": told["seed"]})
                continue
            runs = zip(told["local"], told["remote"], strict=True)
            right = all(
                np.array_equal(self.run(remote), pattern(told["seed"], local, self.run_bytes)) for local, remote in runs
            )
            self.heard.append({"peer": notification.peer, "seed": told["seed"], "right": right})

    def describe(self) -> dict[str, Any]:
        return {"metadata": self.transport.metadata().hex(), "address": self.memory.data_ptr()}

    def connect(self, metadata: str, address: int) -> dict[str, Any]:
        start = time.monotonic()
        peer = self.transport.connect(bytes.fromhex(metadata))
        seconds = time.monotonic() - start
        own = self.transport.prepare(None, self.runs_from(self.memory.data_ptr()))
        self.lists[peer] = (own, self.transport.prepare(peer, self.runs_from(address)))
        return {"peer": peer, "seconds": seconds, "lane": self.transport.lane(peer)}

    def fill(self, seed: int) -> dict[str, Any]:
        for index in range(self.num_runs):
            self.run(index)[:] = pattern(seed, index, self.run_bytes)
        return {}

    def post(
        self, peer: str, seed: int, local: list[int], remote: list[int], operation: str = "WRITE"
    ) -> dict[str, Any]:
        """Start a post. The receiver is told the runs where they fit into a notification, else the first and last."""
        told = {"seed": seed, "local": local, "remote": remote, "operation": operation}
        if len(json.dumps(told)) > 4000:
            told |= {"local": [local[0], local[-1]], "remote": [remote[0], remote[-1]]}
        own, theirs = self.lists[peer]
        indices = np.array(local, np.int32), np.array(remote, np.int32)
        start = time.monotonic()
        notification = json.dumps(told).encode()
        self.posts.append(self.transport.post(own, indices[0], theirs, indices[1], notification, Operation(operation)))
        return {"seconds": time.monotonic() - start}

    def poll(self, timeout: float) -> dict[str, Any]:
        """Follow the last post until it is over or the time is up."""
        post = self.posts[-1]
        start = time.monotonic()
        while (state := self.transport.poll(post)) is PostState.IN_PROGRESS and time.monotonic() < start + timeout:
            self.listen()
        return {
            "state": state.name,
            "seconds": time.monotonic() - start,
            "num_descriptors": post.num_descriptors,
            "num_bytes": post.num_bytes,
            "text": str(post),
        }

    def release(self) -> dict[str, Any]:
        return {"released": self.transport.release(self.posts[-1])}

    def lane(self, peer: str) -> dict[str, Any]:
        return {"lane": self.transport.lane(peer)}

    def disconnect(self, peer: str) -> dict[str, Any]:
        for runs in self.lists.pop(peer, ()):
            runs.release()
        self.transport.disconnect(peer)
        return {}

    def listened(self) -> dict[str, Any]:
        heard, self.heard = self.heard, []
        return {"heard": heard}

    def values(self) -> dict[str, Any]:
        """How often each byte value is in the memory."""
        counts = sum(np.bincount(part, minlength=256) for part in np.array_split(self.memory.numpy(), self.num_runs))
        return {"values": {str(value): int(count) for value, count in enumerate(counts) if count}}

    def landed(self) -> dict[str, Any]:
        """How many bytes are not 0."""
        return {"num_bytes": int(self.memory.count_nonzero())}

    def right(self, seed: int, local: list[int], remote: list[int]) -> dict[str, Any]:
        """Whether our runs `local` hold what a peer that filled its memory with this seed has in its runs `remote`."""
        runs = zip(local, remote, strict=True)
        return {"right": all(np.array_equal(self.run(o), pattern(seed, t, self.run_bytes)) for o, t in runs)}

    def listen_alone(self, listens: bool) -> dict[str, Any]:
        """Whether to progress between commands."""
        self.listens = listens
        return {}

    def progress(self, rounds: int) -> dict[str, Any]:
        for _ in range(rounds):
            self.listen()
        return {}

    def kill_at_first_byte(self, value: int, pid: int, timeout: float) -> dict[str, Any]:
        """Kill a process as soon as our first byte has this value. From here, since a copy takes some 50 ms."""
        memory, deadline = self.memory.numpy(), time.monotonic() + timeout
        while memory[0] != value and time.monotonic() < deadline:
            pass
        os.kill(pid, signal.SIGKILL)
        return {"seen": bool(memory[0] == value)}

    def deregister(self) -> dict[str, Any]:
        """Take the memory from the library and leave everything else as it is."""
        registered = self.transport._registered
        while registered:
            self.transport._agent.deregister_memory(registered.pop())
        return {}

    def proof(self, metadata: str) -> dict[str, Any]:
        start = time.monotonic()
        found = self.transport.quiescence_proof(bytes.fromhex(metadata))
        return {"proven": found.proven, "story": found.story, "seconds": time.monotonic() - start}

    def set_all(self, value: int) -> dict[str, Any]:
        self.memory.fill_(value)
        return {}

    def measure(self, peer: str, local: list[int], remote: list[int], repeat: int) -> dict[str, Any]:
        """Seconds from before each post to DONE, written `repeat` times."""
        own, theirs = self.lists[peer]
        indices = np.array(local, np.int32), np.array(remote, np.int32)
        told = json.dumps({"seed": 0, "local": [], "remote": [], "operation": "WRITE"}).encode()
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            post = self.transport.post(own, indices[0], theirs, indices[1], told)
            while self.transport.poll(post) is PostState.IN_PROGRESS:
                pass
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def close(self) -> dict[str, Any]:
        start = time.monotonic()
        self.transport.close()
        return {"seconds": time.monotonic() - start}


def answer(process: AgentProcess, line: str) -> dict[str, Any]:
    command = json.loads(line)
    try:
        reply = getattr(process, command.pop("do"))(**command)
    except TransportError as error:
        return {"raised": error.status, "text": str(error)}
    assert isinstance(reply, dict)
    return reply


def serve(process: AgentProcess) -> None:
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        line = sys.stdin.readline() if ready else None
        if line == "":
            return
        if line is not None:
            print(json.dumps(answer(process, line)), flush=True)
            if json.loads(line)["do"] == "close":
                return
        if process.listens:
            process.listen()


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = json.loads(sys.argv[1])
    process = AgentProcess(log_path=Path(settings.pop("log_path")), **settings)
    serve(process)
    process.transport.close()
    sys.stdout.flush()
    # A native library's destructor can crash at interpreter exit where libibverbs is installed.
    os._exit(0)


if __name__ == "__main__":
    main()
