"""The rules an incoming message must obey, each stated where it is broken: field, value, rule."""

import functools
import math
from collections.abc import Callable, Mapping, Sized
from typing import ParamSpec, TypeVar

from google.protobuf.message import Message

from kvferry.cache.errors import LocalProtocolError, RemoteProtocolError

MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 1 << 16
MAX_DURATION_SECONDS = 7 * 24 * 3600.0
MAX_COUNT = (1 << 63) - 1
SHOWN_CHARS = 80

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K", bound=int)
V = TypeVar("V")


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raises RemoteProtocolError unless the rule holds."""
    if not holds:
        shown = repr(value)
        shown = shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + "..."
        raise RemoteProtocolError(f"{field} is {shown}: {rule}")


def present(message: Message, name: str) -> None:
    """A field of a message type must be given."""
    require(message.HasField(name), f"{message.DESCRIPTOR.name}.{name}", None, "it must be present")


def one_of(message: Message, name: str) -> str:
    """Which field of a oneof is set; one must be."""
    which = message.WhichOneof(name)
    require(which is not None, f"{message.DESCRIPTOR.name}.{name}", None, "one of its fields must be set")
    return str(which)


def text(field: str, value: str, *, max_chars: int = MAX_TEXT_CHARS) -> str:
    """A string of at most `max_chars`, possibly empty."""
    require(len(value) <= max_chars, field, value, f"{len(value)} characters, at most {max_chars} are allowed")
    return value


def clipped(value: str, *, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Our own sentence for people, cut to what the other side accepts."""
    return value if len(value) <= max_chars else value[: max_chars - 3] + "..."


def name(field: str, value: str, *, max_chars: int = MAX_NAME_CHARS) -> str:
    """A short, printable string that is not empty."""
    require(0 < len(value) <= max_chars, field, value, f"it must have 1 to {max_chars} characters")
    require(value.isprintable(), field, value, "it must be printable")
    return value


def count(field: str, value: int, *, low: int = 0, high: int = MAX_COUNT) -> int:
    """A whole number in [low, high]."""
    require(low <= value <= high, field, value, f"it must be between {low} and {high}")
    return value


def seconds(field: str, value: float, *, zero: bool = False) -> float:
    """A finite duration; `zero` says whether it may be 0."""
    holds = math.isfinite(value) and 0 <= value <= MAX_DURATION_SECONDS and (zero or value > 0)
    least = "at least 0" if zero else "above 0"
    require(holds, field, value, f"it must be a duration in seconds, {least}, at most {MAX_DURATION_SECONDS:.0f}")
    return value


def sized(field: str, value: Sized, *, low: int = 0, high: int) -> None:
    """The number of elements lies in [low, high]."""
    require(low <= len(value) <= high, field, f"{len(value)} elements", f"{low} to {high} are allowed")


def same_length(field: str, value: Sized, other_field: str, other: Sized) -> None:
    """Two lists run in parallel."""
    rule = f"{other_field} has {len(other)}: they must agree"
    require(len(value) == len(other), field, f"{len(value)} elements", rule)


def known(field: str, value: K, names: Mapping[K, V]) -> V:
    """The meaning of an enum number; unspecified and unknown numbers are refused."""
    require(value in names, field, value, f"known numbers are {sorted(names)}")
    return names[value]


def outgoing(convert: Callable[P, R]) -> Callable[P, R]:
    """Our own record does not fit the wire: a LocalProtocolError instead of protobuf's ValueError or TypeError."""

    @functools.wraps(convert)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return convert(*args, **kwargs)
        except (ValueError, TypeError, OverflowError) as error:
            record = type(args[0]).__name__ if args else convert.__name__
            raise LocalProtocolError(f"cannot put this {record} on the wire: {error}") from error

    return checked
