"""Agents of one process, paired for a test."""

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from kvferry.transfer.transport.base import (
    DescriptorList,
    Descriptors,
    Indices,
    Notification,
    Operation,
    Post,
    PostState,
    Transport,
)

RUN_BYTES = 4096
NUM_RUNS = 256
DEADLINE_SECONDS = 20.0


def runs(tensor: torch.Tensor, num_runs: int = NUM_RUNS, run_bytes: int = RUN_BYTES) -> Descriptors:
    """Consecutive runs from the start of a tensor."""
    rows = np.zeros((num_runs, 3), np.uint64)
    rows[:, 0] = tensor.data_ptr() + np.arange(num_runs) * run_bytes
    rows[:, 1] = run_bytes
    return rows


def indices(*values: int) -> Indices:
    return np.array(values, np.int32)


@dataclass
class Agent:
    """One agent with one region."""

    transport: Transport
    memory: torch.Tensor
    heard: list[Notification] = field(default_factory=list)

    def listen(self) -> None:
        self.heard += self.transport.notifications()


@dataclass
class Pair:
    """A writer and its connected target."""

    writer: Agent
    target: Agent
    own_runs: DescriptorList
    target_runs: DescriptorList

    @property
    def target_name(self) -> str:
        return self.target.transport.agent_name

    def post(
        self,
        local: Indices,
        remote: Indices,
        notification: bytes = b"done",
        operation: Operation = Operation.WRITE,
    ) -> Post:
        return self.writer.transport.post(self.own_runs, local, self.target_runs, remote, notification, operation)

    def finish(self, post: Post, num_notifications: int = 1) -> PostState:
        """Progress both ends until the post is over and the target heard that many notifications in all."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            state = self.writer.transport.poll(post)
            self.target.listen()
            if state is not PostState.IN_PROGRESS and len(self.target.heard) >= num_notifications:
                return state
            assert time.monotonic() < deadline, f"{post}: {state}, heard {self.target.heard}"

    def write(self, local: Indices, remote: Indices, notification: bytes = b"done") -> Post:
        """A whole write."""
        return self._whole(local, remote, notification, Operation.WRITE)

    def read(self, local: Indices, remote: Indices, notification: bytes = b"done") -> Post:
        """A whole read, of the target's memory by the writer."""
        return self._whole(local, remote, notification, Operation.READ)

    def _whole(self, local: Indices, remote: Indices, notification: bytes, operation: Operation) -> Post:
        post = self.post(local, remote, notification, operation)
        assert self.finish(post, len(self.target.heard) + 1) is PostState.DONE
        assert self.writer.transport.release(post)
        return post


def connected(writer: Agent, target: Agent, num_runs: int = NUM_RUNS, run_bytes: int = RUN_BYTES) -> Pair:
    """Connect a writer to a target, both with memory for these runs."""
    peer = writer.transport.connect(target.transport.metadata())
    own_runs = writer.transport.prepare(None, runs(writer.memory, num_runs, run_bytes))
    target_runs = writer.transport.prepare(peer, runs(target.memory, num_runs, run_bytes))
    return Pair(writer, target, own_runs, target_runs)
