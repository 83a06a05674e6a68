"""Bytes that are no message are the other side's fault.

The library takes them for a bug of this side: a server logs a traceback and answers UNKNOWN, a client logs a traceback
and gets None. Here they become a RemoteProtocolError, as everything else the other side gets wrong.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.control.errors import abort

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Found: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Parse = Callable[[bytes], Any]

PACKAGE = "/kvferry.v1."

R = TypeVar("R")


class Malformed(NamedTuple):
    """What stands for a message that cannot be parsed."""

    reason: str


def parsed(message: R | Malformed) -> R:
    """The message. Raises RemoteProtocolError when it could not be parsed."""
    if isinstance(message, Malformed):
        raise RemoteProtocolError(f"the message cannot be parsed: {message.reason}")
    return message


def tolerant(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """The same channel, for a stub: what answers it cannot parse are Malformed, so pass every answer to `parsed`."""
    return cast(grpc.aio.Channel, _Tolerant(channel))


class _Tolerant:
    """What stubs use of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, *, response_deserializer: Parse, **options: Any) -> Any:
        return self._channel.unary_unary(method, response_deserializer=_parser(response_deserializer), **options)

    def unary_stream(self, method: str, *, response_deserializer: Parse, **options: Any) -> Any:
        return self._channel.unary_stream(method, response_deserializer=_parser(response_deserializer), **options)

    def stream_stream(self, method: str, *, response_deserializer: Parse, **options: Any) -> Any:
        return self._channel.stream_stream(method, response_deserializer=_parser(response_deserializer), **options)


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Answers bytes that are no message of the method's type with a RemoteProtocolError."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Found]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Found:
        handler = await continuation(handler_call_details)
        ours = str(handler_call_details.method).startswith(PACKAGE)
        return _refusing(handler) if ours and handler is not None else handler


def _refusing(handler: Handler) -> Handler:
    """The same method with a parser that does not raise and a behaviour that refuses what it could not parse."""
    assert handler.request_deserializer is not None
    wrapped: dict[str, Any] = {
        "request_deserializer": _parser(handler.request_deserializer),
        "response_serializer": handler.response_serializer,
    }
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(_of_stream(handler.stream_stream), **wrapped)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_of_one(handler.unary_stream), **wrapped)
    return grpc.unary_unary_rpc_method_handler(_of_one(handler.unary_unary), **wrapped)


def _parser(parse: Parse) -> Parse:
    def parse_or_tell(raw: bytes) -> Any:
        try:
            return parse(raw)
        except DecodeError as error:
            return Malformed(str(error))

    return parse_or_tell


def _of_one(behaviour: Any) -> Any:
    async def answer(request: Any, context: Context) -> Any:
        try:
            parsed(request)
        except RemoteProtocolError as error:
            await abort(context, error)
        return await behaviour(request, context)

    return answer


def _of_stream(behaviour: Any) -> Any:
    async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
        return await behaviour(_each_parsed(requests), context)

    return answer


async def _each_parsed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Raises RemoteProtocolError at the first request that could not be parsed."""
    async for request in requests:
        yield parsed(request)
