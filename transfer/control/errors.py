"""How errors cross the wire: one table, one message of details, the same class at the other end.

The status code tells foreign clients what to do; kvferry's own clients read the ErrorDetail message in the trailing
metadata and raise the error the handler raised.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

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
from kvferry.v1 import common_pb2 as pb

DETAIL_KEY = "kvferry-error-bin"
MAX_DETAIL_BYTES = 6 << 10
"""Trailing metadata of 8 KiB always passes; the rest is room for gRPC's own entries."""

MAX_MESSAGE_CHARS = 1024
MAX_FIELD_CHARS = 256
MAX_POOL_GROUPS = 64

E = TypeVar("E", bound=KVError)


class Crossing(NamedTuple):
    """How one class of error travels.

    Attributes:
        code: the status foreign clients see; also used when an answer carries no details.
        restore: builds the error from the details at the caller's end.
    """

    code: grpc.StatusCode
    restore: Callable[[pb.ErrorDetail], KVError]


def _transfer(error: Callable[..., TransferError]) -> Callable[[pb.ErrorDetail], KVError]:
    return lambda detail: error(detail.message, transfer_id=detail.transfer_id, peer=detail.peer, phase=detail.phase)


def _control(error: Callable[..., ControlError]) -> Callable[[pb.ErrorDetail], KVError]:
    return lambda detail: error(detail.message, peer=detail.peer)


def _plain(error: Callable[[str], KVError]) -> Callable[[pb.ErrorDetail], KVError]:
    return lambda detail: error(detail.message)


def _capacity(detail: pb.ErrorDetail) -> KVError:
    return CapacityError(
        detail.message, requested=detail.requested, available=detail.available, permanent=detail.permanent
    )


def _incompatible(detail: pb.ErrorDetail) -> KVError:
    reasons = [Incompatibility(item.field, item.local, item.remote, item.why) for item in detail.incompatibilities]
    return IncompatiblePeer(detail.peer, reasons)


def _transport(detail: pb.ErrorDetail) -> KVError:
    return TransportError(detail.backend, detail.status, detail.message)


Code = grpc.StatusCode

# The two protocol errors swap: what the server calls the peer's fault is, at the peer, our own.
CROSSINGS: dict[type[KVError], Crossing] = {
    ConfigError: Crossing(Code.INVALID_ARGUMENT, _plain(ConfigError)),
    CapacityError: Crossing(Code.RESOURCE_EXHAUSTED, _capacity),
    IncompatiblePeer: Crossing(Code.FAILED_PRECONDITION, _incompatible),
    LocalProtocolError: Crossing(Code.INTERNAL, _plain(RemoteProtocolError)),
    RemoteProtocolError: Crossing(Code.INVALID_ARGUMENT, _plain(LocalProtocolError)),
    TransferError: Crossing(Code.ABORTED, _transfer(TransferError)),
    TransferTimeout: Crossing(Code.DEADLINE_EXCEEDED, _transfer(TransferTimeout)),
    TransferCancelled: Crossing(Code.CANCELLED, _transfer(TransferCancelled)),
    PeerLost: Crossing(Code.UNAVAILABLE, _transfer(PeerLost)),
    TransportError: Crossing(Code.INTERNAL, _transport),
    ControlError: Crossing(Code.UNAVAILABLE, _control(ControlError)),
    Unavailable: Crossing(Code.UNAVAILABLE, _control(Unavailable)),
    DeadlineExceeded: Crossing(Code.DEADLINE_EXCEEDED, _control(DeadlineExceeded)),
    UnknownMember: Crossing(Code.NOT_FOUND, _plain(UnknownMember)),
    ComputeError: Crossing(Code.INTERNAL, _plain(ComputeError)),
    InvariantError: Crossing(Code.DATA_LOSS, _plain(InvariantError)),
    KVError: Crossing(Code.UNKNOWN, _plain(KVError)),
}

_BY_NAME = {error.__name__: crossing for error, crossing in CROSSINGS.items()}


def crossing_of(error: KVError) -> tuple[str, Crossing]:
    """Name and row of the nearest class in the table."""
    nearest = next(base for base in type(error).__mro__ if base in CROSSINGS)
    return nearest.__name__, CROSSINGS[nearest]


def status_of(error: KVError) -> tuple[grpc.StatusCode, str, pb.ErrorDetail]:
    """What a server answers for an error: code, one line for people, details."""
    kind, crossing = crossing_of(error)
    return crossing.code, _clip(str(error), MAX_MESSAGE_CHARS), _detail(kind, error)


async def abort(context: "grpc.aio.ServicerContext[object, object]", error: KVError) -> NoReturn:
    """End a call with the status of an error."""
    code, line, detail = status_of(error)
    await context.abort(code, line, ((DETAIL_KEY, detail.SerializeToString()),))
    raise AssertionError("abort always raises")


@contextmanager
def calling(peer: str) -> Iterator[None]:
    """Turn the failure of a call to `peer` into the error its server raised, or into a ControlError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error, peer) from error
    except grpc.aio.UsageError as error:
        raise Unavailable(f"the connection was closed on this side: {error}", peer=peer) from error


def error_of(error: grpc.aio.AioRpcError, peer: str) -> KVError:
    """The typed error behind a failed call to `peer`."""
    detail = _detail_of(error)
    if detail is not None and detail.kind in _BY_NAME:
        return _BY_NAME[detail.kind].restore(detail)
    return _bare(error.code(), error.details() or error.code().name, peer)


def _bare(code: grpc.StatusCode, text: str, peer: str) -> KVError:
    """An answer without details: from the library, a proxy or a foreign server."""
    if code in (Code.UNAVAILABLE, Code.CANCELLED):
        return Unavailable(f"the server cannot be reached or went away ({text})", peer=peer)
    if code is Code.DEADLINE_EXCEEDED:
        return DeadlineExceeded("no answer within the deadline of the call", peer=peer)
    if code is Code.UNIMPLEMENTED:
        return ConfigError(f"{peer} does not offer this call ({text}): is it the right endpoint and version?")
    if code is Code.RESOURCE_EXHAUSTED:
        return CapacityError(f"{peer}: {text}", requested=(), available=(), permanent=True)
    return KVError(f"{peer} failed: {code.name}: {text}")


def _detail_of(error: grpc.aio.AioRpcError) -> pb.ErrorDetail | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                return pb.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None


def _detail(kind: str, error: KVError) -> pb.ErrorDetail:
    """All fields the error has; long texts are cut and reasons beyond the size limit left out."""
    detail = pb.ErrorDetail(kind=kind, message=_clip(getattr(error, "reason", str(error)), MAX_MESSAGE_CHARS))
    for field in ("transfer_id", "peer", "phase", "backend", "status"):
        setattr(detail, field, _clip(str(getattr(error, field, "")), MAX_FIELD_CHARS))
    if isinstance(error, CapacityError):
        detail.requested.extend(error.requested[:MAX_POOL_GROUPS])
        detail.available.extend(error.available[:MAX_POOL_GROUPS])
        detail.permanent = error.permanent
    if isinstance(error, IncompatiblePeer):
        detail.incompatibilities.extend(_fitting(error.reasons, MAX_DETAIL_BYTES - detail.ByteSize()))
    return detail


def _fitting(reasons: Sequence[Incompatibility], budget_bytes: int) -> Iterator[pb.Incompatibility]:
    for reason in reasons:
        message = pb.Incompatibility(**{name: _clip(value, MAX_FIELD_CHARS) for name, value in vars(reason).items()})
        budget_bytes -= message.ByteSize() + 8
        if budget_bytes < 0:
            return
        yield message


def _clip(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."
