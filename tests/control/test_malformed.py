"""Bytes that are no message, in either direction."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvferry.cache.errors import LocalProtocolError, RemoteProtocolError
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.control.convert import channel, rank
from kvferry.transfer.control.directory import Directory
from kvferry.transfer.control.directory_client import DirectoryClient
from kvferry.transfer.control.errors import calling
from kvferry.transfer.control.handlers import Envelope, Hello
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.control.wire import open_channel
from kvferry.transfer.types import PROTOCOL_VERSION, Role
from kvferry.v1 import directory_pb2, inference_pb2, peer_pb2, transfer_pb2
from kvferry.v1.peer_pb2 import RegisterResponse
from kvferry.v1.transfer_pb2 import ChannelResponse
from tests.control import samples
from tests.control.worlds import Worker, run, wait_until, workers

GARBAGE = b"\xff\xff\xff"
MODULES = (directory_pb2, peer_pb2, transfer_pb2, inference_pb2)
METHODS = [
    method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@asynccontextmanager
async def served() -> AsyncIterator[grpc.aio.Channel]:
    """A server of all services; what it would do with a good request does not matter."""
    worker: Any = Worker(samples.PREFILL)
    server = ControlServer(
        "127.0.0.1:0", directory=Directory(), peer=worker.network, transfer=worker.network, inference=worker
    )
    await server.start()
    async with open_channel(server.address) as wire:
        yield wire
    await worker.network.close()
    await server.stop(0.1)


async def _send(wire: grpc.aio.Channel, method: Any, raw: bytes) -> None:
    """Raises what the server answers."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    with calling("server"):
        if method.client_streaming:
            call = wire.stream_stream(path)(timeout=5)
            await call.write(raw)
            await call.read()
        elif method.server_streaming:
            await wire.unary_stream(path)(raw, timeout=5).read()
        else:
            await wire.unary_unary(path)(raw, timeout=5)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_request_that_is_no_message_is_the_callers_fault(method: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with served() as wire:
            with pytest.raises(LocalProtocolError, match="cannot be parsed"):
                await _send(wire, method, GARBAGE)

    run(test)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_message_of_a_method_that_is_not_offered_is_unimplemented() -> None:
    async def test() -> None:
        async with served() as wire:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wire.unary_unary("/kvferry.v1.Inference/Guess")(b"", timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(test)


class Babbler:
    """A server that answers every call with bytes of the test's choice; channels say `channel` and stay open."""

    def __init__(self, answer: bytes = GARBAGE, channel: tuple[bytes, ...] = (GARBAGE,)) -> None:
        self._answer, self._channel = answer, channel
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(tuple(self._handlers()))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.num_channels = 0

    def _handlers(self) -> list[Any]:
        made = []
        for service in {method.containing_service.full_name for method in METHODS}:
            methods = {
                method.name: self._handler(method)
                for method in METHODS
                if method.containing_service.full_name == service
            }
            made.append(grpc.method_handlers_generic_handler(service, methods))
        return made

    def _handler(self, method: Any) -> Any:
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(self._talk)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._one)

    async def _one(self, request: bytes, context: Any) -> bytes:
        return self._answer

    async def _stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield self._answer

    async def _talk(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.num_channels += 1
        for raw in self._channel:
            yield raw
        await asyncio.Event().wait()

    async def __aenter__(self) -> "Babbler":
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)


async def _all_of(events: AsyncIterator[object]) -> None:
    async for _ in events:
        pass


CALLS: dict[str, Callable[[InferenceClient], Awaitable[object]]] = {
    "generate": lambda client: _all_of(client.generate(samples.call())),
    "prefill": lambda client: client.prefill(samples.call()),
    "decode": lambda client: _all_of(client.decode(samples.decode_call())),
    "cancel": lambda client: client.cancel(samples.KEY, "over"),
    "tokenize": lambda client: client.tokenize("hello"),
    "get_status": lambda client: client.get_status(),
}


@pytest.mark.parametrize("name", CALLS)
def test_answer_that_is_no_message_is_the_servers_fault(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Babbler() as babbler, InferenceClient(babbler.endpoint) as client:
            with pytest.raises(RemoteProtocolError, match="cannot be parsed"):
                await CALLS[name](client)

    run(test)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


REGISTERED = RegisterResponse(
    accepted=rank.rank_to_wire(samples.rank(samples.PREFILL, Role.PREFILL))
).SerializeToString()
GREETING = ChannelResponse(
    message=channel.envelope_to_wire(Envelope(0, Hello(samples.PREFILL, PROTOCOL_VERSION)))
).SerializeToString()


@pytest.mark.parametrize(
    "answer, said",
    [
        pytest.param(GARBAGE, (), id="registration"),
        pytest.param(REGISTERED, (GARBAGE,), id="hello"),
        pytest.param(REGISTERED, (GREETING, GARBAGE), id="after the hello"),
    ],
)
def test_sender_that_talks_garbage_is_dropped(
    answer: bytes, said: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        decode = Worker(samples.DECODE)
        async with workers(decode), Babbler(answer, said) as babbler:
            await decode.network.connect(samples.entry(samples.PREFILL, babbler.endpoint))
            await wait_until(lambda: "cannot be parsed" in caplog.text, "the complaint is logged")
            assert len(decode.sink.lost) == len(decode.sink.up)
            assert babbler.num_channels == min(1, len(said))
            assert decode.network._links, "it is dialled again later"

    run(test)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_directory_that_talks_garbage_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Babbler() as babbler:
            client = DirectoryClient(
                babbler.endpoint, on_snapshot=lambda snapshot: None, entry=samples.entry(samples.PREFILL)
            )
            client.start()
            await wait_until(lambda: "cannot be parsed" in caplog.text, "the complaint is logged")
            assert all(not task.done() for task in client._tasks)
            await client.leave()

    run(test)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
