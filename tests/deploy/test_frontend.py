"""The frontend over real gRPC, with workers that do what a test tells them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from kvferry.cache.errors import ConfigError, PeerLost, Unavailable
from kvferry.deploy.config import FrontendConfig
from kvferry.deploy.frontend import Frontend
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.inference import DecodeCall, DirectoryEntry, GenerateCall, GenerateEvent, PrefillReply, TokenChunk
from kvferry.transfer.types import Role, TransferKey, WorkerId
from tests.control import samples
from tests.control.worlds import run, wait_until


class ScriptedWorker:
    """Offers every prompt; decodes without end while `endless`; fails with `error` when it has one."""

    def __init__(self, name: str, role: Role) -> None:
        self.worker = WorkerId(name, 1)
        self.role = role
        self.endless = False
        self.error: Exception | None = None
        self.num_calls = 0
        self.cancelled: list[TransferKey] = []
        self.server = ControlServer("127.0.0.1:0", inference=self)

    def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        raise ConfigError("no worker here has role both")

    async def prefill(self, call: GenerateCall) -> PrefillReply:
        self._count()
        return PrefillReply(samples.KEY, self.worker, (1, 2, 3), 0.0, 0.5)

    async def decode(self, call: DecodeCall) -> AsyncGenerator[GenerateEvent, None]:
        self._count()
        yield TokenChunk((7,), (-0.1,), "x")
        if self.endless:
            await asyncio.Event().wait()
        yield samples.summary()

    async def cancel(self, key: TransferKey, reason: str) -> None:
        self.cancelled.append(key)

    def _count(self) -> None:
        self.num_calls += 1
        if self.error is not None:
            raise self.error


class Cluster:
    """A frontend, its client, and workers that are all paired."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self.frontend = Frontend(FrontendConfig(listen="127.0.0.1:0"))
        self.prefill = [ScriptedWorker(f"prefill-{index}", Role.PREFILL) for index in range(num_prefill)]
        self.decode = [ScriptedWorker(f"decode-{index}", Role.DECODE) for index in range(num_decode)]

    @property
    def workers(self) -> list[ScriptedWorker]:
        return self.prefill + self.decode

    async def join(self) -> None:
        for worker, others in [(w, self.decode) for w in self.prefill] + [(w, self.prefill) for w in self.decode]:
            await worker.server.start()
            paired = tuple(other.worker for other in others)
            entry = DirectoryEntry(worker.worker, worker.role, worker.server.address, "tiny", paired)
            await self.frontend._directory.join(entry, 60.0)

    async def ask(self) -> None:
        """One request to its end."""
        async with aclosing(self.frontend.generate(samples.call())) as events:
            async for _ in events:
                pass


@asynccontextmanager
async def running(num_prefill: int = 1, num_decode: int = 1) -> AsyncIterator[tuple[Cluster, InferenceClient]]:
    cluster = Cluster(num_prefill, num_decode)
    client = InferenceClient(await cluster.frontend.start())
    try:
        await cluster.join()
        yield cluster, client
    finally:
        await client.close()
        await cluster.frontend.stop()
        for worker in cluster.workers:
            await worker.server.stop(0.0)


def test_stop_takes_back_the_prompts_of_requests_it_cuts_off() -> None:
    async def test() -> None:
        async with running() as (cluster, client):
            cluster.decode[0].endless = True
            stream = client.generate(samples.call())
            await anext(stream)
            await cluster.frontend.stop()
            assert cluster.prefill[0].cancelled == [samples.KEY]
            with pytest.raises(Unavailable):
                await anext(stream)

    run(test)


def test_request_that_fails_while_decoding_takes_back_its_prompt() -> None:
    async def test() -> None:
        async with running() as (cluster, _):
            cluster.decode[0].error = ConfigError("not this one")
            with pytest.raises(ConfigError):
                await cluster.ask()
            await wait_until(lambda: cluster.prefill[0].cancelled == [samples.KEY], "the prompt is taken back")

    run(test)


def test_prefill_worker_that_fails_at_once_does_not_attract_requests() -> None:
    async def test() -> None:
        async with running(num_prefill=2) as (cluster, _):
            broken, healthy = cluster.prefill
            broken.error = Unavailable("shutting down", peer="prefill-0")
            for _ in range(5):
                await cluster.ask()
            assert (broken.num_calls, healthy.num_calls) == (1, 5)

    run(test)


@pytest.mark.parametrize(
    "error", [Unavailable("going", peer="x"), PeerLost("cut", transfer_id="t", peer="x", phase="wire")]
)
def test_decode_worker_that_fails_at_once_does_not_attract_requests(error: Exception) -> None:
    async def test() -> None:
        async with running(num_decode=2) as (cluster, _):
            broken, healthy = cluster.decode
            broken.error = error
            for _ in range(5):
                await cluster.ask()
            assert (broken.num_calls, healthy.num_calls) == (1, 5)

    run(test)


def test_request_is_not_sent_over_another_route_once_a_token_reached_the_client() -> None:
    async def test() -> None:
        async with running(num_decode=2) as (cluster, client):
            for worker in cluster.decode:
                worker.endless = True
            stream = client.generate(samples.call())
            await anext(stream)
            used = next(worker for worker in cluster.decode if worker.num_calls)
            await used.server.stop(0.0)
            with pytest.raises(Unavailable):
                await anext(stream)
            assert sum(worker.num_calls for worker in cluster.decode) == 1

    run(test)


def test_request_fails_with_the_last_error_when_every_route_fails() -> None:
    async def test() -> None:
        async with running(num_decode=2) as (cluster, _):
            for worker in cluster.decode:
                worker.error = Unavailable("going", peer=worker.worker.name)
            with pytest.raises(Unavailable, match="going"):
                await cluster.ask()
            assert [worker.num_calls for worker in cluster.decode] == [1, 1]
            await wait_until(lambda: len(cluster.prefill[0].cancelled) == 2, "both prompts are taken back")

    run(test)


def test_error_in_a_task_beside_the_requests_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def breaks() -> None:
        raise ZeroDivisionError("a bug")

    async def test() -> None:
        async with running() as (cluster, _):
            cluster.frontend._spawn(breaks(), "a task")
            await wait_until(lambda: "a task ended: a bug" in caplog.text, "the error is logged")

    with caplog.at_level(logging.ERROR):
        run(test)
