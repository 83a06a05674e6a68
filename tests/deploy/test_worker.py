"""Whole workers and a frontend over real gRPC in one process; pages move between their pools in its memory."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from kvferry.cache.errors import CapacityError, ConfigError, KVError, PeerLost
from kvferry.deploy.config import FrontendConfig, WorkerConfig
from kvferry.deploy.frontend import Frontend
from kvferry.deploy.worker import Worker, build_parts
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.inference import DecodeCall, GenerateCall, GenerateSummary, SamplingParams, TokenChunk
from kvferry.transfer.types import Direction, TransferKey
from tests.control.worlds import run, wait_until

CALL = GenerateCall("r1", "to the Moon and back, and then once more", sampling=SamplingParams(8, ignore_eos=True))
KEY = TransferKey("ab" * 16, 1)


class Fleet:
    """A frontend and its workers."""

    def __init__(self, frontend: Frontend, client: InferenceClient) -> None:
        self.frontend = frontend
        self.client = client
        self.workers: dict[str, Worker] = {}
        self.clients: dict[str, InferenceClient] = {}

    async def add(self, role: str, directory: str, **transfer: object) -> None:
        config = WorkerConfig.model_validate(
            {
                "role": role,
                "name": role,
                "directory": directory,
                "model": "tiny-gpt-oss",
                "engine": "synthetic",
                "pools": {"quota_bytes": "4MiB"},
                "transfer": {"transport": "loopback", **transfer},
            }
        )
        worker = Worker(config, build_parts(config), None)
        self.workers[role] = worker
        self.clients[role] = InferenceClient(await worker.start())

    async def tokens(self, call: GenerateCall = CALL) -> tuple[int, ...]:
        found: list[int] = []
        async with aclosing(self.client.generate(call)) as events:
            async for event in events:
                if isinstance(event, TokenChunk):
                    found += event.token_ids
                else:
                    assert isinstance(event, GenerateSummary)
                    assert event.wire.num_pages > 0
        return tuple(found)

    async def stop(self) -> None:
        for client in (self.client, *self.clients.values()):
            await client.close()
        assert all([await worker.stop() for worker in self.workers.values()])
        await self.frontend.stop()


@asynccontextmanager
async def fleet(schedule: str = "context_first", **transfer: object) -> AsyncIterator[Fleet]:
    """A prefill and a decode worker, paired."""
    frontend = Frontend(FrontendConfig.model_validate({"listen": "127.0.0.1:0", "schedule": schedule}))
    endpoint = await frontend.start()
    made = Fleet(frontend, InferenceClient(endpoint))
    try:
        for role in ("prefill", "decode"):
            await made.add(role, endpoint, **transfer)
        await made.client.wait_serving(10.0)
        yield made
    finally:
        await made.stop()


def test_tokens_are_the_same_with_every_schedule_and_direction() -> None:
    found: set[tuple[int, ...]] = set()

    async def test() -> None:
        for schedule, direction in itertools.product(("context_first", "generation_first"), ("push", "pull")):
            async with fleet(schedule, direction=direction) as made:
                assert made.workers["decode"]._parts.loop._settings.direction is Direction(direction)
                found.add(await made.tokens())
                found.add(await made.tokens())

    run(test)
    assert [len(tokens) for tokens in found] == [8]


def test_worker_above_its_quarantine_limit_does_not_serve_until_the_pages_are_back() -> None:
    async def test() -> None:
        async with fleet(quarantine_limit=0.01) as made:
            transceiver, decode = made.workers["decode"]._transceiver, made.clients["decode"]
            sender = made.workers["prefill"]._worker
            assert (await decode.get_status()).condition == "ok"
            await decode.wait_serving(5.0)
            call = DecodeCall("r1", KEY, sender, (1, 2, 3), SamplingParams(8), 30.0, early=True)
            waiting = asyncio.ensure_future(anext(decode.decode(call)))
            await wait_until(lambda: transceiver.num_receiving, "the pages are granted")
            network = made.workers["decode"]._network
            network.send, real_send = lambda worker, message: True, network.send  # type: ignore[method-assign]
            transceiver.on_channel_lost(sender, "the wire was cut")
            with pytest.raises(PeerLost, match="the wire was cut"):
                await waiting
            await wait_serving_is(decode, False)
            status = await decode.get_status()
            assert "in quarantine" in status.condition
            assert [group.quarantined for group in status.pool_groups] == [2]
            with pytest.raises(CapacityError, match="nothing new is admitted"):
                await made.tokens()
            network.send = real_send  # type: ignore[method-assign]
            transceiver.on_channel_up(sender)
            await wait_serving_is(decode, True)
            assert (await decode.get_status()).condition == "ok"
            assert len(await made.tokens()) == 8

    run(test)


async def wait_serving_is(client: InferenceClient, serving: bool) -> None:
    """Without any request, within about a second."""
    started = time.monotonic()
    while await client.is_serving() is not serving:
        assert time.monotonic() - started < 2.0, f"serving is not {serving} in time"


def test_workers_turn_text_into_tokens() -> None:
    async def test() -> None:
        async with fleet() as made:
            asked = [await client.tokenize("hello") for client in made.clients.values()]
            assert asked[0] == asked[1] != ()
            with pytest.raises(ConfigError, match="prompt is empty"):
                await made.clients["prefill"].tokenize("")
            with pytest.raises(ConfigError, match="has no model"):
                await made.client.tokenize("hello")

    run(test)


def test_request_that_expects_a_prompt_hears_when_prefill_refuses_it() -> None:
    async def test() -> None:
        async with fleet() as made:
            sender = made.workers["prefill"]._worker
            call = DecodeCall("r1", KEY, sender, (1, 2, 3), SamplingParams(8), 30.0, early=True)
            waiting = asyncio.ensure_future(anext(made.clients["decode"].decode(call)))
            await wait_until(lambda: made.workers["decode"]._transceiver.num_receiving, "the pages are granted")
            refused = GenerateCall("r1", "", sampling=SamplingParams(8), key=KEY)
            with pytest.raises(ConfigError, match="prompt is empty"):
                await made.clients["prefill"].prefill(refused)
            with pytest.raises(KVError, match="prompt is empty"):
                await waiting

    run(test)


def test_prompt_waits_under_the_key_it_was_given_for_as_long_as_the_reply_says() -> None:
    async def test() -> None:
        async with fleet(hold_seconds=7.0) as made:
            call = GenerateCall("r1", "hello", sampling=SamplingParams(8), key=KEY)
            reply = await made.clients["prefill"].prefill(call)
            assert (reply.key, reply.lease_seconds) == (KEY, 7.0)
            await made.clients["prefill"].cancel(KEY, "not wanted")
            await wait_until(lambda: not made.workers["prefill"]._transceiver.num_sending, "its pages are free")

    run(test)
