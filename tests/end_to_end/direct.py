"""Calls straight to workers, past the frontend, and all that comes back until they end."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.cache.errors import KVError
from kvferry.transfer.control.client import InferenceClient
from kvferry.transfer.inference import DecodeCall, GenerateCall, GenerateEvent, PrefillReply, TokenChunk, WorkerStatus
from kvferry.transfer.types import TransferKey
from tests.end_to_end.serving import REQUEST_SECONDS, Service

Result = TypeVar("Result")


@dataclass
class Reply:
    """The events of a stream, the error that ended it, if one did, and the seconds it took."""

    events: list[GenerateEvent] = field(default_factory=list)
    error: KVError | None = None
    seconds: float = 0.0

    @property
    def chunks(self) -> list[TokenChunk]:
        return [event for event in self.events if isinstance(event, TokenChunk)]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)


def prefill(service: Service, name: str, call: GenerateCall) -> PrefillReply:
    """Have a worker compute a prompt and hold its pages. Raises what the worker raised."""
    return _run(_prefill(service, name, call))


def decode(service: Service, name: str, call: DecodeCall) -> Reply:
    """Have a worker fetch the pages of a prompt and answer; an error ends the reply."""
    return _run(_decode(service, name, call))


def decode_everywhere(service: Service, calls: list[tuple[str, DecodeCall]]) -> list[Reply]:
    """As `decode`, each at the worker named beside it, all at once."""

    async def run() -> list[Reply]:
        return await asyncio.gather(*(_decode(service, name, call) for name, call in calls))

    return _run(run())


def cancel(service: Service, name: str, key: TransferKey) -> None:
    """Stop an attempt at a worker."""

    async def run() -> None:
        async with _client(service, name) as client:
            await client.cancel(key, "the test takes it back")

    _run(run())


def status(service: Service, name: str) -> WorkerStatus:
    """What one worker says of itself."""

    async def run() -> WorkerStatus:
        async with _client(service, name) as client:
            return await client.get_status()

    return _run(run())


def decode_call(call: GenerateCall, computed: PrefillReply, **changes: Any) -> DecodeCall:
    """The call that goes on from a computed prompt; `changes` are what is not as it should be."""
    right = {
        "request_id": call.request_id,
        "key": computed.key,
        "sender": computed.sender,
        "prompt_token_ids": computed.prompt_token_ids,
        "sampling": call.sampling,
        "timeout_seconds": call.timeout_seconds,
        "cache_salt": call.cache_salt,
    }
    return DecodeCall(**{**right, **changes})


def _client(service: Service, name: str) -> InferenceClient:
    endpoint = service.worker(name).endpoint
    assert endpoint is not None
    return InferenceClient(endpoint)


async def _prefill(service: Service, name: str, call: GenerateCall) -> PrefillReply:
    async with _client(service, name) as client:
        return await client.prefill(call)


async def _decode(service: Service, name: str, call: DecodeCall) -> Reply:
    reply, started = Reply(), time.monotonic()
    async with _client(service, name) as client:
        try:
            async with aclosing(client.decode(call)) as events:
                async for event in events:
                    reply.events.append(event)
        except KVError as error:
            reply.error = error
    reply.seconds = time.monotonic() - started
    return reply


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    async def run() -> Result:
        async with asyncio.timeout(REQUEST_SECONDS):
            return await work

    return asyncio.run(run())
