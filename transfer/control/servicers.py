"""Each gRPC service as a thin layer over its handler: check, convert, call, convert, map errors.

Streams are written with `context.write` instead of being yielded (hence the overrides mypy must be told about): a call
cancelled between two messages then unwinds through the handler's own `finally` at once, not when a suspended generator
is collected.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias, cast

import grpc

from kvferry.cache.errors import DeadlineExceeded, IncompatiblePeer, KVError
from kvferry.transfer.control.convert import channel, checks, common, directory, inference, rank, status
from kvferry.transfer.control.errors import abort
from kvferry.transfer.control.handlers import (
    DirectoryHandler,
    Envelope,
    InferenceHandler,
    PeerHandler,
    TransferHandler,
)
from kvferry.transfer.control.wire import WRITE_SECONDS
from kvferry.v1 import (
    directory_pb2,
    directory_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """Answer a KVError with its status. Any other error is a bug: the library logs it and answers UNKNOWN."""
    try:
        yield
    except KVError as error:
        await abort(context, error)


def _closing(stream: AsyncIterator[Any]) -> "aclosing[Any]":
    """Handlers' streams are async generators: closing them runs their `finally` before the call ends."""
    return aclosing(cast("Any", stream))


async def _write(context: Context, message: object) -> None:
    """Send one message of a stream. Raises DeadlineExceeded when the caller does not read."""
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await context.write(message)
    except TimeoutError:
        raise DeadlineExceeded(f"nothing was read for {WRITE_SECONDS:g} s", peer=context.peer()) from None


class DirectoryServicer(directory_pb2_grpc.DirectoryServicer):
    def __init__(self, handler: DirectoryHandler) -> None:
        self._handler = handler

    async def Join(self, request: directory_pb2.JoinRequest, context: Context) -> directory_pb2.JoinResponse:
        async with answering(context):
            checks.present(request, "entry")
            wished = checks.seconds("JoinRequest.lease_seconds", request.lease_seconds)
            granted = await self._handler.join(directory.entry_from_wire(request.entry), wished)
            return directory_pb2.JoinResponse(lease_seconds=granted)

    async def Renew(self, request: directory_pb2.RenewRequest, context: Context) -> directory_pb2.RenewResponse:
        async with answering(context):
            checks.present(request, "worker")
            paired = directory.paired_from_wire("RenewRequest.paired", request.paired)
            await self._handler.renew(common.worker_from_wire(request.worker), paired)
            return directory_pb2.RenewResponse()

    async def Leave(self, request: directory_pb2.LeaveRequest, context: Context) -> directory_pb2.LeaveResponse:
        async with answering(context):
            checks.present(request, "worker")
            await self._handler.leave(common.worker_from_wire(request.worker))
            return directory_pb2.LeaveResponse()

    async def Watch(  # type: ignore[override]
        self, request: directory_pb2.WatchRequest, context: Context
    ) -> None:
        async with answering(context), _closing(self._handler.watch()) as snapshots:
            async for snapshot in snapshots:
                await _write(context, directory.snapshot_to_wire(snapshot))


class PeerServicer(peer_pb2_grpc.PeerServicer):
    def __init__(self, handler: PeerHandler) -> None:
        self._handler = handler

    # A refusal is an answer and not an error status, whose size is limited: every reason must get through.
    async def Register(self, request: peer_pb2.RegisterRequest, context: Context) -> peer_pb2.RegisterResponse:
        async with answering(context):
            checks.present(request, "rank")
            try:
                answer = await self._handler.register(rank.rank_from_wire(request.rank))
            except IncompatiblePeer as error:
                return peer_pb2.RegisterResponse(rejected=rank.rejection_to_wire(error))
            return peer_pb2.RegisterResponse(accepted=rank.rank_to_wire(answer))

    async def GetStatus(self, request: peer_pb2.GetStatusRequest, context: Context) -> peer_pb2.GetStatusResponse:
        async with answering(context):
            return peer_pb2.GetStatusResponse(status=status.status_to_wire(await self._handler.get_status()))


class TransferServicer(transfer_pb2_grpc.TransferServicer):
    def __init__(self, handler: TransferHandler) -> None:
        self._handler = handler

    async def Channel(  # type: ignore[override]
        self, request_iterator: AsyncIterator[transfer_pb2.ChannelRequest], context: Context
    ) -> None:
        inbound = _envelopes(request_iterator)
        async with answering(context), _closing(self._handler.channel(inbound)) as outbound:
            async for envelope in outbound:
                await _write(context, transfer_pb2.ChannelResponse(message=channel.envelope_to_wire(envelope)))


async def _envelopes(requests: AsyncIterator[transfer_pb2.ChannelRequest]) -> AsyncIterator[Envelope]:
    async for request in requests:
        checks.present(request, "message")
        yield channel.envelope_from_wire(request.message)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, handler: InferenceHandler) -> None:
        self._handler = handler

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        async with answering(context):
            checks.present(request, "call")
            call = inference.call_from_wire(request.call)
            async with _closing(self._handler.generate(call)) as events:
                async for event in events:
                    await _write(context, inference_pb2.GenerateResponse(event=inference.event_to_wire(event)))

    async def Prefill(self, request: inference_pb2.PrefillRequest, context: Context) -> inference_pb2.PrefillResponse:
        async with answering(context):
            checks.present(request, "call")
            reply = await self._handler.prefill(inference.call_from_wire(request.call))
            return inference.prefill_reply_to_wire(reply)

    async def Decode(  # type: ignore[override]
        self, request: inference_pb2.DecodeRequest, context: Context
    ) -> None:
        async with answering(context):
            call = inference.decode_call_from_wire(request)
            async with _closing(self._handler.decode(call)) as events:
                async for event in events:
                    await _write(context, inference_pb2.DecodeResponse(event=inference.event_to_wire(event)))

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        async with answering(context):
            checks.present(request, "key")
            reason = checks.text("CancelRequest.reason", request.reason)
            await self._handler.cancel(common.key_from_wire(request.key), reason)
            return inference_pb2.CancelResponse()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        async with answering(context):
            prompt, chat = inference.tokenize_from_wire(request)
            return inference.tokens_to_wire(await self._handler.tokenize(prompt, chat))
