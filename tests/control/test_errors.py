import asyncio
from collections.abc import AsyncIterator
from typing import NoReturn

import pytest

from kvferry.cache import errors
from kvferry.cache.errors import (
    CapacityError,
    ComputeError,
    ConfigError,
    ControlError,
    DeadlineExceeded,
    Incompatibility,
    IncompatiblePeer,
    InvariantError,
    KVError,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    TransportError,
    Unavailable,
    UnknownMember,
)
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.control.errors import CROSSINGS, MAX_DETAIL_BYTES, status_of
from kvferry.transfer.control.server import ControlServer
from kvferry.transfer.inference import DecodeCall, GenerateCall, GenerateEvent, PrefillReply
from kvferry.transfer.types import TransferKey
from tests.control import samples
from tests.control.worlds import closing, run

WHERE = {"transfer_id": "ab" * 16, "peer": "prefill-0#11", "phase": "wire"}
REASONS = [Incompatibility("dtype", "float32", "bfloat16", "bytes differ"), Incompatibility("block", "4", "16", "")]
EXAMPLES: list[KVError] = [
    ConfigError("prompt is empty: give at least one token"),
    CapacityError("needs 90 slots", requested=(90, 3), available=(70, 3), permanent=True),
    CapacityError("needs 9 slots", requested=(9,), available=(7,)),
    IncompatiblePeer("decode-0#22", REASONS),
    LocalProtocolError("we sent nonsense"),
    RemoteProtocolError("you sent nonsense"),
    TransferError("lane broke: ümläut\nsecond line", **WHERE),
    TransferTimeout("5 s passed", **WHERE),
    TransferCancelled("client went away", **WHERE),
    PeerLost("connection reset", **WHERE),
    TransportError("UCX", "ERR_CANCELED", "post failed"),
    ControlError("odd answer", peer="prefill-0"),
    Unavailable("going down", peer="prefill-0"),
    DeadlineExceeded("took too long", peer="prefill-0"),
    UnknownMember("who?"),
    ComputeError("logits for position 7 peak at nan"),
    InvariantError("free 3 + held 4 != 8"),
    KVError("something else"),
]
SWAPPED = {LocalProtocolError: RemoteProtocolError, RemoteProtocolError: LocalProtocolError}


class Failing:
    """Answers every call with one error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _fail(self) -> NoReturn:
        raise self._error

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateEvent]:
        yield samples.summary()
        self._fail()

    async def prefill(self, call: GenerateCall) -> PrefillReply:
        self._fail()

    async def decode(self, call: DecodeCall) -> AsyncIterator[GenerateEvent]:
        self._fail()
        yield samples.summary()

    async def cancel(self, key: TransferKey, reason: str) -> None:
        self._fail()

    async def tokenize(self, prompt: str, chat: bool) -> tuple[int, ...]:
        self._fail()


def failures(error: Exception) -> list[KVError]:
    """What a client of a failing server gets: from a call, and from a stream after its first event."""
    caught: list[KVError] = []

    async def test() -> None:
        server = ControlServer("127.0.0.1:0", inference=Failing(error))
        await server.start()
        client = InferenceClient(server.address)
        async with closing(client.close, server.stop):
            with pytest.raises(KVError) as unary:
                await client.prefill(samples.call())
            with pytest.raises(KVError) as text:
                await client.tokenize("hello")
            with pytest.raises(KVError) as stream:
                async for _ in client.generate(samples.call()):
                    pass
            caught.extend((unary.value, text.value, stream.value))

    run(test)
    return caught


def test_every_error_class_is_in_the_table_and_has_an_example() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KVError)}

    assert set(CROSSINGS) == classes
    assert {type(example) for example in EXAMPLES} == classes


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_error_reaches_the_caller_with_its_fields(error: KVError) -> None:
    for caught in failures(error):
        assert type(caught) is SWAPPED.get(type(error), type(error))
        assert str(caught) == str(error)
        assert vars(caught) == vars(error)


def test_subclass_outside_the_table_travels_as_its_nearest_base() -> None:
    class Odd(TransferTimeout):
        pass

    assert [type(error) for error in failures(Odd("late", **WHERE))] == [TransferTimeout] * 3


def test_unexpected_error_is_a_plain_error_at_the_caller() -> None:
    async def ignore(_: object) -> None:
        return None

    for caught in failures(ZeroDivisionError("oops")):
        assert type(caught) is KVError
        assert "UNKNOWN" in str(caught)


def test_details_stay_within_the_size_of_metadata() -> None:
    reasons = [Incompatibility(f"field {i}", "x" * 1000, "ü" * 1000, "why" * 500) for i in range(100)]
    for error in (IncompatiblePeer("p" * 5000, reasons), ConfigError("ü" * 100_000)):
        _, line, detail = status_of(error)
        assert detail.ByteSize() <= MAX_DETAIL_BYTES
        assert len(line) <= 1024
        assert type(failures(error)[0]) is type(error)


def test_cancelled_task_cancels_the_call() -> None:
    class Waiting(Failing):
        def __init__(self) -> None:
            super().__init__(ConfigError("unused"))
            self.entered = asyncio.Event()
            self.cancelled = asyncio.Event()

        async def prefill(self, call: GenerateCall) -> PrefillReply:
            self.entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
            raise AssertionError

    async def test() -> None:
        handler = Waiting()
        server = ControlServer("127.0.0.1:0", inference=handler)
        await server.start()
        client = InferenceClient(server.address)
        async with closing(client.close, server.stop):
            calling = asyncio.create_task(client.prefill(samples.call()))
            await handler.entered.wait()
            calling.cancel()
            await handler.cancelled.wait()
            with pytest.raises(asyncio.CancelledError):
                await calling

    run(test)
