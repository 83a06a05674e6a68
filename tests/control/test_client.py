import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from kvferry.cache.errors import DeadlineExceeded, LocalProtocolError, Unavailable
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.inference import (
    DecodeCall,
    GenerateCall,
    GenerateEvent,
    PrefillReply,
    SamplingParams,
    TokenChunk,
    WorkerStatus,
)
from kvferry.transfer.types import RankInfo, TransferKey
from tests.control import samples
from tests.control.worlds import closing, run, wait_until

DECODE_CALL = DecodeCall("r1", samples.KEY, samples.PREFILL, (1, 2, 3), SamplingParams(8), 10.0)


class Engine:
    """Streams chunks for ever when the prompt is "endless", else three and a summary; remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.cancelled: list[tuple[TransferKey, str]] = []
        self.unwound = asyncio.Event()

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateEvent]:
        self.calls.append(call)
        number = 0
        try:
            while number < 3 or call.prompt == "endless":
                yield TokenChunk((number,), (-0.5,), f"word {number} ")
                number += 1
            if call.prompt == "silent":
                await asyncio.Event().wait()
            yield samples.summary()
        finally:
            self.unwound.set()

    async def prefill(self, call: GenerateCall) -> PrefillReply:
        self.calls.append(call)
        return samples.prefill_reply()

    async def decode(self, call: DecodeCall) -> AsyncIterator[GenerateEvent]:
        self.calls.append(call)
        yield TokenChunk((7,), (-0.1,), "x")
        yield samples.summary()

    async def cancel(self, key: TransferKey, reason: str) -> None:
        self.cancelled.append((key, reason))

    async def tokenize(self, prompt: str, chat: bool) -> tuple[int, ...]:
        if prompt == "silent":
            await asyncio.Event().wait()
        return (int(chat), *prompt.encode())

    async def register(self, remote: RankInfo) -> RankInfo:
        return remote

    async def get_status(self) -> WorkerStatus:
        return samples.status()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Engine, ControlServer, InferenceClient]]:
    engine = Engine()
    server = ControlServer("127.0.0.1:0", inference=engine, peer=engine)
    await server.start()
    client = InferenceClient(server.address)
    async with closing(client.close, lambda: server.stop(0.2)):
        yield engine, server, client


def test_generate_streams_chunks_then_the_summary() -> None:
    async def test() -> None:
        async with served() as (engine, _, client):
            events = [event async for event in client.generate(samples.call())]
            assert [event.token_ids for event in events[:-1] if isinstance(event, TokenChunk)] == [(0,), (1,), (2,)]
            assert events[-1] == samples.summary()
            assert engine.calls == [samples.call()]

    run(test)


def test_prefill_decode_cancel_and_status_carry_their_records() -> None:
    async def test() -> None:
        async with served() as (engine, _, client):
            reply = await client.prefill(samples.call())
            events = [event async for event in client.decode(DECODE_CALL)]
            await client.cancel(samples.KEY, "no longer wanted")
            assert reply == samples.prefill_reply()
            assert events == [TokenChunk((7,), (-0.1,), "x"), samples.summary()]
            assert engine.calls == [samples.call(), DECODE_CALL]
            assert engine.cancelled == [(samples.KEY, "no longer wanted")]
            assert await client.get_status() == samples.status()

    run(test)


def test_tokenize_answers_tokens_and_has_a_deadline() -> None:
    async def test() -> None:
        async with served() as (_, server, client):
            assert await client.tokenize("ab") == (0, 97, 98)
            assert await client.tokenize("", chat=True) == (1,)
            with pytest.raises(DeadlineExceeded, match=server.address):
                await client.tokenize("silent", timeout_seconds=0.2)

    run(test)


@pytest.mark.parametrize("prompt", ["endless", "silent"])
def test_closing_the_stream_cancels_the_call(prompt: str) -> None:
    async def test() -> None:
        async with served() as (engine, _, client):
            async with aclosing(client.generate(samples.call(prompt=prompt))) as events:
                assert isinstance(await anext(events), TokenChunk)
            await engine.unwound.wait()

    run(test)


def test_cancelling_the_reading_task_cancels_the_call() -> None:
    async def test() -> None:
        async with served() as (engine, _, client):
            seen: list[GenerateEvent] = []

            async def read() -> None:
                async for event in client.generate(samples.call(prompt="silent")):
                    seen.append(event)

            reading = asyncio.create_task(read())
            await wait_until(lambda: len(seen) == 3, "the chunks arrived")
            reading.cancel()
            await engine.unwound.wait()
            with pytest.raises(asyncio.CancelledError):
                await reading

    run(test)


def test_deadline_ends_a_silent_stream_at_both_ends() -> None:
    async def test() -> None:
        async with served() as (engine, server, client):
            with pytest.raises(DeadlineExceeded, match=server.address):
                async for _ in client.generate(samples.call(0.3, "silent")):
                    pass
            await engine.unwound.wait()

    run(test)


def test_server_that_stops_during_a_stream_is_unavailable() -> None:
    async def test() -> None:
        async with served() as (_, server, client):
            events = client.generate(samples.call(prompt="silent"))
            assert isinstance(await anext(events), TokenChunk)
            await server.stop(0.0)
            with pytest.raises(Unavailable, match=server.address):
                async for _ in events:
                    pass

    run(test)


def test_server_that_is_not_there_is_unavailable() -> None:
    async def test() -> None:
        async with InferenceClient("127.0.0.1:1") as client:
            with pytest.raises(Unavailable):
                await client.prefill(samples.call())
            with pytest.raises(Unavailable):
                await client.is_serving()
            with pytest.raises(DeadlineExceeded, match=r"not serving after 0\.3 s"):
                await client.wait_serving(0.3)

    run(test)


def test_record_that_breaks_a_rule_is_our_fault() -> None:
    async def test() -> None:
        async with served() as (engine, _, client):
            with pytest.raises(LocalProtocolError, match=r"SamplingParams\.max_new_tokens is 0"):
                await client.prefill(GenerateCall(prompt="x", sampling=SamplingParams(max_new_tokens=0)))
            assert engine.calls == []

    run(test)


def test_wait_serving_returns_when_the_server_says_so() -> None:
    async def test() -> None:
        async with served() as (_, server, client):
            assert not await client.is_serving()
            waiting = asyncio.create_task(client.wait_serving(5))
            await server.set_serving(True)
            await waiting
            assert await client.is_serving()

    run(test)


def test_closed_client_says_that_it_is_unavailable() -> None:
    async def test() -> None:
        async with served() as (_, _, client):
            await client.close()
            with pytest.raises(Unavailable, match="closed on this side"):
                await client.prefill(samples.call())
            for stream in (client.generate(samples.call()), client.decode(DECODE_CALL)):
                with pytest.raises(Unavailable, match="closed on this side"):
                    await anext(stream)

    run(test)
