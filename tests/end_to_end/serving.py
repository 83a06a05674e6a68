"""Clusters of real processes for tests, and what is asked of them."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest

from kvferry.deploy.cluster import Child, Cluster, running_cluster, start_cluster
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.inference import GenerateCall, GenerateSummary, SamplingParams, TokenChunk, WorkerStatus
from tests.helpers import wait_until

START_SECONDS = 90.0
REQUEST_SECONDS = 60.0
CHUNK_TOKENS = 256
VOCABULARY = 256
FIRST_TOKEN_ID = 3

both_managers = pytest.mark.parametrize("manager", ["V2", pytest.param("V1", marks=pytest.mark.full)])
"""V2 in every run; V1, where each case starts a cluster of its own, in the long one."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Answer:
    """All that came back for one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    summary: GenerateSummary


def prompt_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Byte tokens drawn from a fixed seed."""
    drawn = np.random.default_rng([seed, num_tokens]).integers(FIRST_TOKEN_ID, FIRST_TOKEN_ID + VOCABULARY, num_tokens)
    return tuple(drawn.tolist())


def call_for(prompt: Sequence[int], max_new_tokens: int = 32, *, salt: str = "", **sampling: Any) -> GenerateCall:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, **sampling)
    return GenerateCall(
        prompt_token_ids=tuple(prompt), sampling=params, timeout_seconds=REQUEST_SECONDS, cache_salt=salt
    )


async def answer(client: InferenceClient, call: GenerateCall) -> Answer:
    """Read a whole stream."""
    tokens: list[int] = []
    logprobs: list[float] = []
    text, summary = "", None
    async with aclosing(client.generate(call)) as events:
        async for event in events:
            if isinstance(event, TokenChunk):
                tokens += event.token_ids
                logprobs += event.logprobs
                text += event.text
            else:
                assert summary is None, "one summary ends a stream"
                summary = event
    assert summary is not None, "a stream ends with a summary"
    return Answer(tuple(tokens), tuple(logprobs), text, summary)


@dataclass(frozen=True)
class Service:
    """A running cluster and its frontend's address."""

    cluster: Cluster
    endpoint: str

    @property
    def workers(self) -> list[Child]:
        return self.cluster.children[1:]

    def worker(self, name: str) -> Child:
        return next(child for child in self.workers if child.name == name)

    def ask(self, call: GenerateCall) -> Answer:
        return self.ask_all([call])[0]

    def ask_all(self, calls: Sequence[GenerateCall]) -> list[Answer]:
        """Send all at once and wait for all."""

        async def run() -> list[Answer]:
            async with InferenceClient(self.endpoint) as client:
                return await asyncio.gather(*(answer(client, call) for call in calls))

        return _bounded(run())

    def statuses(self) -> dict[str, WorkerStatus]:
        """What every living worker says of itself."""

        async def run() -> dict[str, WorkerStatus]:
            found = {}
            for child in self.workers:
                if child.process.poll() is None and child.endpoint:
                    async with InferenceClient(child.endpoint) as client:
                        found[child.name] = await client.get_status()
            return found

        return _bounded(run())

    def is_idle(self) -> bool:
        """Nobody uses any page of any worker, no request or transfer is open, and the books add up."""
        return all(is_idle(status) for status in self.statuses().values())


def is_idle(status: WorkerStatus) -> bool:
    assert status.integrity == "ok", status.integrity
    open_work = (status.waiting, status.running, status.holding, status.receiving)
    return open_work == (0, 0, 0, 0) and all(
        (group.free + group.cached, group.reserved, group.quarantined) == (group.num_slots, 0, 0)
        for group in status.pool_groups
    )


def _bounded(work: Coroutine[Any, Any, Result]) -> Result:
    async def run() -> Result:
        async with asyncio.timeout(REQUEST_SECONDS + START_SECONDS):
            return await work

    return asyncio.run(run())


@contextlib.contextmanager
def serving(num_prefill: int = 1, num_decode: int = 1, *, wait: bool = True, **worker: Any) -> Iterator[Service]:
    """A cluster; with `wait`, and with workers of both roles, every pair that can exist does."""
    settings = {"num_threads": 1, "prefill_chunk_tokens": CHUNK_TOKENS, **worker}
    with running_cluster() as cluster:
        endpoint = start_cluster(
            cluster,
            num_prefill=num_prefill,
            num_decode=num_decode,
            worker=settings,
            timeout_seconds=START_SECONDS,
        )
        service = Service(cluster, endpoint)
        if wait and num_prefill and num_decode:
            wait_paired(service)
        yield service


def wait_paired(service: Service) -> None:
    """Wait until the frontend has a route over every pair that could be one."""

    async def run() -> None:
        async with InferenceClient(service.endpoint) as client:
            await client.wait_serving(START_SECONDS)

    _bounded(run())
    wait_until(lambda: _all_paired(service.statuses()), START_SECONDS, "all workers are paired")


def _all_paired(statuses: dict[str, WorkerStatus]) -> bool:
    for status in statuses.values():
        others = [other for other in statuses.values() if other.worker != status.worker]
        wanted = {
            other.worker
            for other in others
            if (status.role.prefills and other.role.decodes) or (status.role.decodes and other.role.prefills)
        }
        if wanted != {peer.worker for peer in status.peers}:
            return False
    return bool(statuses)
