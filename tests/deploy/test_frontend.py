"""The frontend over real gRPC, with workers that do what a test tells them."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvferry.cache.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    TransferCancelled,
    Unavailable,
)
from kvferry.deploy.config import FrontendConfig
from kvferry.deploy.frontend import Frontend
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.inference import DecodeCall, DirectoryEntry, GenerateCall, GenerateEvent, PrefillReply, TokenChunk
from kvferry.transfer.types import Role, TransferKey, WorkerId
from tests.control import samples
from tests.control.worlds import run, wait_until

CALL = replace(samples.call(), key=None)


class ScriptedWorker:
    """Offers every prompt; decodes without end while `endless`; fails with `error` when it has one.

    While `gate` is closed, what it was asked to do does not begin.
    """

    def __init__(self, name: str, role: Role) -> None:
        self.worker = WorkerId(name, 1)
        self.role = role
        self.endless = False
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_calls = 0
        self.prefills: list[GenerateCall] = []
        self.decodes: list[DecodeCall] = []
        self.num_dropped = 0
        self.cancelled: list[TransferKey] = []
        self.server = ControlServer("127.0.0.1:0", inference=self)

    def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        raise ConfigError("no worker here has role both")

    async def prefill(self, call: GenerateCall) -> PrefillReply:
        self.prefills.append(call)
        await self._begin()
        return PrefillReply(call.key or samples.KEY, self.worker, (1, 2, 3), 0.0, 0.5, 30.0)

    async def decode(self, call: DecodeCall) -> AsyncGenerator[GenerateEvent, None]:
        self.decodes.append(call)
        await self._begin()
        yield TokenChunk((7,), (-0.1,), "x")
        if self.endless:
            await asyncio.Event().wait()
        yield samples.summary()

    async def tokenize(self, prompt: str, chat: bool) -> tuple[int, ...]:
        return (len(prompt), int(chat))

    async def cancel(self, key: TransferKey, reason: str) -> None:
        self.cancelled.append(key)

    async def _begin(self) -> None:
        self.num_calls += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_dropped += 1
            raise
        if self.error is not None:
            raise self.error


class Cluster:
    """A frontend, its client, and workers that are all paired."""

    def __init__(self, num_prefill: int, num_decode: int, schedule: str) -> None:
        self.frontend = Frontend(FrontendConfig.model_validate({"listen": "127.0.0.1:0", "schedule": schedule}))
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

    async def ask(self, **changes: Any) -> list[GenerateEvent]:
        """One request to its end."""
        async with aclosing(self.frontend.generate(replace(CALL, **changes))) as events:
            return [event async for event in events]


@asynccontextmanager
async def running(
    num_prefill: int = 1, num_decode: int = 1, schedule: str = "context_first"
) -> AsyncIterator[tuple[Cluster, InferenceClient]]:
    cluster = Cluster(num_prefill, num_decode, schedule)
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
            stream = client.generate(CALL)
            await anext(stream)
            await cluster.frontend.stop()
            assert [worker.cancelled for worker in cluster.workers] == [[samples.KEY]] * 2
            with pytest.raises(Unavailable):
                await anext(stream)

    run(test)


def test_request_that_fails_while_decoding_takes_back_its_prompt() -> None:
    async def test() -> None:
        async with running() as (cluster, _):
            cluster.decode[0].error = ConfigError("not this one")
            with pytest.raises(ConfigError):
                await cluster.ask()
            for worker in cluster.workers:
                await wait_until(lambda worker=worker: worker.cancelled == [samples.KEY], "both workers hear of it")

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
    "error",
    [
        Unavailable("going", peer="x"),
        PeerLost("cut", transfer_id="t", peer="x", phase="wire"),
        CapacityError("nothing new is admitted", requested=(1,), available=(0,)),
    ],
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


def test_prompt_is_not_computed_again_for_workers_that_had_no_room_a_moment_ago() -> None:
    async def test() -> None:
        async with running(num_decode=3) as (cluster, _):
            for worker in cluster.decode:
                worker.error = CapacityError("full", requested=(1,), available=(0,))
            for _ in range(2):
                with pytest.raises(CapacityError, match="full"):
                    await cluster.ask()
            assert cluster.prefill[0].num_calls == 3 + 1

    run(test)


def test_request_that_could_never_fit_is_tried_once() -> None:
    async def test() -> None:
        async with running(num_decode=2) as (cluster, _):
            for worker in cluster.decode:
                worker.error = CapacityError("too long", requested=(9,), available=(1,), permanent=True)
            with pytest.raises(CapacityError, match="too long"):
                await cluster.ask()
            assert sum(worker.num_calls for worker in cluster.decode) == 1

    run(test)


def test_cancels_reach_workers_that_leave_while_they_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running() as (cluster, client):
            cluster.decode[0].endless = True
            stream = client.generate(CALL)
            await anext(stream)
            await asyncio.gather(cluster.frontend._close_unused(()), stream.aclose())
            await cluster.frontend._close_unused(())
            for worker in cluster.workers:
                await wait_until(lambda worker=worker: worker.cancelled == [samples.KEY], "both workers hear of it")

    with caplog.at_level(logging.ERROR):
        run(test)
    assert "ended" not in caplog.text


def test_request_is_not_sent_over_another_route_once_a_token_reached_the_client() -> None:
    async def test() -> None:
        async with running(num_decode=2) as (cluster, client):
            for worker in cluster.decode:
                worker.endless = True
            stream = client.generate(CALL)
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


def test_request_that_succeeds_cancels_nothing() -> None:
    async def test() -> None:
        async with running() as (cluster, _):
            assert len(await cluster.ask()) == 2
            await cluster.frontend.stop()
            assert [worker.cancelled for worker in cluster.workers] == [[], []]

    run(test)


def test_client_that_goes_away_ends_the_request_at_both_workers() -> None:
    async def test() -> None:
        async with running() as (cluster, client):
            cluster.decode[0].endless = True
            stream = client.generate(CALL)
            await anext(stream)
            await stream.aclose()
            for worker in cluster.workers:
                await wait_until(lambda worker=worker: worker.cancelled == [samples.KEY], "both workers hear of it")

    run(test)


def test_key_of_a_client_is_refused() -> None:
    async def test() -> None:
        async with running() as (cluster, _):
            with pytest.raises(ConfigError, match="keys are made by the frontend"):
                await cluster.ask(key=samples.KEY)
            with pytest.raises(ConfigError, match="has no model"):
                await cluster.frontend.tokenize("text", False)

    run(test)


# ---- generation first


GENERATION_FIRST = "generation_first"


def test_both_workers_are_asked_at_the_same_time_under_one_key() -> None:
    async def test() -> None:
        async with running(schedule=GENERATION_FIRST) as (cluster, _):
            prefill, decode = cluster.workers
            prefill.gate.clear()
            asking = asyncio.ensure_future(cluster.ask(prompt="hello", chat=True))
            await wait_until(lambda: prefill.prefills and decode.decodes, "both are asked")
            prefill.gate.set()
            events = await asking
            (asked,), (call,) = prefill.prefills, decode.decodes
            assert asked.key == call.key
            assert call.key.attempt == 1
            assert (call.early, call.sender) == (True, prefill.worker)
            assert asked.prompt_token_ids == call.prompt_token_ids == (5, 1)
            assert asked.request_id == call.request_id
            assert events[-1].timings.prefill_seconds == 0.5
            assert [worker.cancelled for worker in cluster.workers] == [[], []]

    run(test)


def test_token_ids_of_the_client_are_taken_as_they_are() -> None:
    async def test() -> None:
        async with running(schedule=GENERATION_FIRST) as (cluster, _):
            await cluster.ask(prompt=None, prompt_token_ids=(4, 5, 6))
            assert cluster.decode[0].decodes[0].prompt_token_ids == (4, 5, 6)

    run(test)


def test_each_generation_first_request_has_a_key_of_its_own() -> None:
    async def test() -> None:
        async with running(schedule=GENERATION_FIRST) as (cluster, _):
            for _ in range(2):
                await cluster.ask()
            assert len({call.key for call in cluster.decode[0].decodes}) == 2

    run(test)


@pytest.mark.parametrize("failing, waiting", [("prefill", "decode"), ("decode", "prefill")])
def test_failure_of_one_worker_ends_the_call_of_the_other_at_once(failing: str, waiting: str) -> None:
    async def test() -> None:
        async with running(schedule=GENERATION_FIRST) as (cluster, _):
            (broken,), (other,) = getattr(cluster, failing), getattr(cluster, waiting)
            broken.error = ConfigError("not this one")
            other.gate.clear()
            with pytest.raises(ConfigError, match="not this one"):
                await cluster.ask()
            await wait_until(lambda: other.num_dropped or not other.num_calls, "the other call is over")
            for worker in cluster.workers:
                await wait_until(lambda worker=worker: len(worker.cancelled) == 1, "both workers hear of it")
            assert broken.cancelled == other.cancelled

    run(test)


@pytest.mark.parametrize("late, early", [("prefill", "decode"), ("decode", "prefill")])
def test_error_of_the_worker_where_the_failure_began_is_the_one_that_is_told(late: str, early: str) -> None:
    async def test() -> None:
        async with running(schedule=GENERATION_FIRST) as (cluster, _):
            (root,), (follower,) = getattr(cluster, late), getattr(cluster, early)
            root.error = ConfigError("this is why")
            follower.error = TransferCancelled("the peer gave up", transfer_id="t", peer="x", phase="wire")
            root.gate.clear()
            asking = asyncio.ensure_future(cluster.ask())
            await wait_until(lambda: root.num_calls and follower.num_calls, "both are asked")
            root.gate.set()
            with pytest.raises(ConfigError, match="this is why"):
                await asking

    run(test)


def test_generation_first_goes_over_another_route_when_prefill_is_gone() -> None:
    async def test() -> None:
        async with running(num_prefill=2, schedule=GENERATION_FIRST) as (cluster, _):
            broken, healthy = cluster.prefill
            broken.error = Unavailable("shutting down", peer="prefill-0")
            for _ in range(3):
                assert await cluster.ask()
            assert (broken.num_calls, healthy.num_calls) == (1, 3)

    run(test)


def test_generation_first_client_that_goes_away_ends_the_request_at_both_workers() -> None:
    async def test() -> None:
        async with running(schedule=GENERATION_FIRST) as (cluster, client):
            prefill, decode = cluster.workers
            prefill.gate.clear()
            decode.gate.clear()
            asking = asyncio.ensure_future(anext(client.generate(CALL)))
            await wait_until(lambda: prefill.num_calls and decode.num_calls, "both are asked")
            asking.cancel()
            await wait_until(lambda: prefill.num_dropped and decode.num_dropped, "both calls are over")
            await wait_until(lambda: prefill.cancelled and decode.cancelled, "both workers hear of it")
            assert prefill.cancelled == decode.cancelled == [prefill.prefills[0].key]

    run(test)


def test_generation_first_request_ends_at_its_deadline() -> None:
    async def test() -> None:
        async with running(schedule=GENERATION_FIRST) as (cluster, _):
            for worker in cluster.workers:
                worker.gate.clear()
            with pytest.raises(DeadlineExceeded):
                await cluster.ask(timeout_seconds=0.3)

    run(test)
