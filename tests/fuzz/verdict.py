"""What a server may answer to anything."""

from dataclasses import dataclass, field
from typing import Any

import grpc

from kvferry.cache.errors import ComputeError, ControlError, InvariantError, KVError, LocalProtocolError
from kvferry.transfer.control.convert import channel, checks, directory, inference, rank, status
from kvferry.transfer.control.errors import CROSSINGS, DETAIL_KEY
from kvferry.transfer.control.wire import MAX_MESSAGE_BYTES
from kvferry.transfer.inference import WorkerStatus
from kvferry.transfer.types import TransferResult
from kvferry.v1 import common_pb2, directory_pb2, inference_pb2, peer_pb2, transfer_pb2

MAX_SHOWN_BYTES = 4000


@dataclass(frozen=True)
class Method:
    """One rpc.

    Attributes:
        may_wait: a good call may take longer than this test waits, so the end of its patience is an answer too.
    """

    path: str
    request: Any
    response: Any
    streams: bool = False
    may_wait: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def of_directory(self) -> bool:
        return ".Directory/" in self.path


def _method(service: str, name: str, module: Any, **traits: bool) -> Method:
    request, response = getattr(module, f"{name}Request"), getattr(module, f"{name}Response")
    return Method(f"/kvferry.v1.{service}/{name}", request, response, **traits)


JOIN = _method("Directory", "Join", directory_pb2)
RENEW = _method("Directory", "Renew", directory_pb2)
LEAVE = _method("Directory", "Leave", directory_pb2)
WATCH = _method("Directory", "Watch", directory_pb2, streams=True, may_wait=True)
REGISTER = _method("Peer", "Register", peer_pb2)
GET_STATUS = _method("Peer", "GetStatus", peer_pb2)
CHANNEL = _method("Transfer", "Channel", transfer_pb2, streams=True, may_wait=True)
GENERATE = _method("Inference", "Generate", inference_pb2, streams=True, may_wait=True)
PREFILL = _method("Inference", "Prefill", inference_pb2, may_wait=True)
DECODE = _method("Inference", "Decode", inference_pb2, streams=True, may_wait=True)
CANCEL = _method("Inference", "Cancel", inference_pb2)
TOKENIZE = _method("Inference", "Tokenize", inference_pb2, may_wait=True)

METHODS = (
    *(JOIN, RENEW, LEAVE, WATCH, REGISTER, GET_STATUS, CHANNEL),
    *(GENERATE, PREFILL, DECODE, CANCEL, TOKENIZE),
)

FORBIDDEN = (LocalProtocolError, InvariantError, ComputeError)
"""Errors that say that the server itself is broken."""


@dataclass
class Answer:
    """What came back for one call.

    Attributes:
        error: the status the call ended with; None: it ended well, or this side ended it.
    """

    responses: list[bytes] = field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None


def check_answer(method: Method, requests: list[bytes], answer: Answer) -> list[str]:
    """Names of what came: classes of records, and of the error or its status.

    Raises: AssertionError: it is neither a good answer nor a typed error that blames the caller or the moment.
    """
    names = [_name(_record(method, raw)) for raw in answer.responses]
    if answer.error is not None:
        names.append(_check_error(method, requests, answer.error))
    return names


def _name(record: object) -> str:
    if isinstance(record, TransferResult):
        return f"result {record.status.value} {record.failure.code if record.failure else ''}".strip()
    return type(record).__name__


def _record(method: Method, raw: bytes) -> Any:
    """Our own client must understand what our own server says."""
    message = method.response.FromString(raw)
    convert = _CONVERTERS.get(method.name)
    return message if convert is None else convert(message)


def status_of(answer: Answer) -> WorkerStatus:
    """What a good answer of GetStatus says. Raises AssertionError."""
    assert answer.error is None, answer.error
    record = _record(GET_STATUS, answer.responses[0])
    assert isinstance(record, WorkerStatus)
    return record


def _channel_envelope(message: transfer_pb2.ChannelResponse) -> Any:
    checks.present(message, "message")
    return channel.envelope_from_wire(message.message).body


def _registered(message: peer_pb2.RegisterResponse) -> Any:
    if checks.one_of(message, "outcome") == "rejected":
        return rank.rejection_from_wire(message.rejected, "server")
    return rank.rank_from_wire(message.accepted)


def _healthy(message: peer_pb2.GetStatusResponse) -> Any:
    record = status.status_from_wire(message.status)
    assert record.integrity == "ok", f"the pools' books do not add up: {record.integrity}"
    return record


_CONVERTERS: dict[str, Any] = {
    "Join": lambda message: checks.seconds("JoinResponse.lease_seconds", message.lease_seconds),
    "Watch": directory.snapshot_from_wire,
    "Register": _registered,
    "GetStatus": _healthy,
    "Channel": _channel_envelope,
    "Generate": lambda message: inference.event_from_wire(message.event),
    "Prefill": inference.prefill_reply_from_wire,
    "Decode": lambda message: inference.event_from_wire(message.event),
    "Tokenize": inference.tokens_from_wire,
}


def _check_error(method: Method, requests: list[bytes], error: grpc.aio.AioRpcError) -> str:
    code, detail = error.code(), _detail(error)
    if detail is None:
        reason = f"{code.name} without details: {error.details()}"
        assert _needs_no_detail(method, requests, code), reason
        return code.name
    kinds: dict[str, type[KVError]] = {kind.__name__: kind for kind in CROSSINGS}
    assert detail.kind in kinds, f"unknown kind of error {detail.kind!r}"
    kind = kinds[detail.kind]
    story = f"{detail.kind}: {error.details()}"
    assert code is CROSSINGS[kind].code, f"{code.name} for {story}"
    assert kind not in (KVError, ControlError), f"an error without a meaning, {story}"
    assert not issubclass(kind, FORBIDDEN), f"the server blames itself, {story}"
    return detail.kind


def _needs_no_detail(method: Method, requests: list[bytes], code: grpc.StatusCode) -> bool:
    """The library answers by itself when a message is too large, and when this side's patience is over."""
    too_large = any(len(raw) > MAX_MESSAGE_BYTES for raw in requests)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return too_large
    return code is grpc.StatusCode.DEADLINE_EXCEEDED and method.may_wait


def _detail(error: grpc.aio.AioRpcError) -> common_pb2.ErrorDetail | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            return common_pb2.ErrorDetail.FromString(value)
    return None


def shown(method: Method, raw: bytes) -> str:
    """A message so that it can be sent again."""
    text = raw.hex()
    cut = "" if len(raw) <= MAX_SHOWN_BYTES else f"... ({len(raw)} bytes)"
    return f"{method.name} {text[: 2 * MAX_SHOWN_BYTES]}{cut}"
