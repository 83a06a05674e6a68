"""Messages that are wrong on purpose: seeded changes of protobuf messages and of their bytes."""

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MAX_RANDOM_BYTES = 200
MAX_COPIES = 300
DESCENT = 0.8

_UNSIGNED_32 = (0, 1, 2, 255, 256, 4096, 2**16, 2**21, 2**21 + 1, 2**31 - 1, 2**31, 2**32 - 1)
_UNSIGNED_64 = (0, 1, 2, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_SIGNED_64 = (0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63))
_ENUM_NUMBERS = (0, 1, 2, 3, 7, 99, 2**31 - 1, -1)
_DOUBLES = (
    0.0,
    -0.0,
    -1.0,
    5e-324,
    1e-9,
    0.001,
    0.05,
    1.0,
    1000.0,
    1e9,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
)
_STRINGS = (
    "",
    " ",
    "two words",
    "line\nbreak",
    "\x00",
    "\u202e",
    "x" * 127,
    "x" * 129,
    "y" * 257,
    "z" * 70_000,
    "-1",
    "é",
)

_BOUNDARIES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_UINT32: _UNSIGNED_32,
    FieldDescriptor.CPPTYPE_UINT64: _UNSIGNED_64,
    FieldDescriptor.CPPTYPE_INT64: _SIGNED_64,
    FieldDescriptor.CPPTYPE_ENUM: _ENUM_NUMBERS,
    FieldDescriptor.CPPTYPE_DOUBLE: _DOUBLES,
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_STRING: _STRINGS,
}
"""Every scalar type that kvferry's messages have."""


def mutated(message: Message, rng: random.Random) -> bytes:
    """Bytes that come from a good message, changed in one or a few ways. Most parse, some do not; few are unchanged."""
    return rng.choices(_WAYS, _WEIGHTS)[0](message, rng)


def mutated_body(said: Any, rng: random.Random) -> bytes:
    """As `mutated`, for a ChannelRequest or ChannelResponse: mostly the body inside is changed."""
    which = said.message.WhichOneof("body")
    if rng.random() < 0.2 or which is None:
        return mutated(said, rng)
    body = getattr(said.message, which)
    try:
        body.CopyFrom(type(body).FromString(mutated(body, rng)))
    except DecodeError:
        return flip_bits(said, rng)
    return bytes(said.SerializeToString())


def change_fields(message: Message, rng: random.Random) -> bytes:
    """One to three fields set to a boundary value, cleared, or made the wrong length."""
    changed = type(message).FromString(message.SerializeToString())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = _place(changed, rng)
        if place is not None:
            _change(*place, rng)
    return changed.SerializeToString()


def flip_bits(message: Message, rng: random.Random) -> bytes:
    raw = bytearray(message.SerializeToString())
    for _ in range(rng.randint(1, 4) if raw else 0):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def truncate(message: Message, rng: random.Random) -> bytes:
    raw = message.SerializeToString()
    return raw[: rng.randrange(len(raw) + 1)]


def splice(message: Message, rng: random.Random) -> bytes:
    """A piece twice, or moved, or followed by unknown fields."""
    raw = message.SerializeToString()
    start, end = sorted((rng.randrange(len(raw) + 1), rng.randrange(len(raw) + 1)))
    return rng.choice((raw + raw, raw[:end] + raw[start:], raw[end:] + raw[:end], raw + rng.randbytes(8)))


def random_bytes(message: Message, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(MAX_RANDOM_BYTES))


_WAYS: list[Callable[[Message, random.Random], bytes]] = [change_fields, flip_bits, truncate, splice, random_bytes]
_WEIGHTS = [70, 12, 6, 6, 6]


def _place(message: Message, rng: random.Random) -> tuple[Message, FieldDescriptor] | None:
    """A field, drawn level by level so that the few outer ones come as often as the many inside."""
    if not message.DESCRIPTOR.fields:
        return None
    field = rng.choice(message.DESCRIPTOR.fields)
    inside = _inside(message, field)
    if inside and rng.random() < DESCENT:
        return _place(rng.choice(inside), rng) or (message, field)
    return message, field


def _inside(message: Message, field: FieldDescriptor) -> list[Message]:
    """The messages that this field holds."""
    if field.message_type is None:
        return []
    if field.is_repeated:
        return list(getattr(message, field.name))
    return [getattr(message, field.name)] if message.HasField(field.name) else []


def _change(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    if field.is_repeated:
        _change_list(message, field, rng)
    elif field.message_type is not None:
        _change_presence(message, field, rng)
    else:
        setattr(message, field.name, _boundary(field, getattr(message, field.name), rng))


def _change_presence(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    if message.HasField(field.name) and rng.random() < 0.7:
        message.ClearField(field.name)
    else:
        getattr(message, field.name).SetInParent()


def _change_list(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    """Emptied, shuffled, cut, many times as long, or with one odd element."""
    values = getattr(message, field.name)
    kept = list(values)
    kind = rng.choice(("clear", "shuffle", "cut", "repeat", "element"))
    if kind == "element":
        _add_odd(values, field, kept, rng)
        return
    if kind == "shuffle":
        rng.shuffle(kept)
    elif kind == "cut":
        kept = kept[: rng.randrange(len(kept) + 1)]
    elif kind == "repeat":
        kept = (kept * MAX_COPIES)[: rng.randint(1, MAX_COPIES)]
    copies = [type(value).FromString(value.SerializeToString()) for value in kept] if field.message_type else kept
    message.ClearField(field.name)
    if kind != "clear":
        getattr(message, field.name).extend(copies)


def _add_odd(values: Any, field: FieldDescriptor, kept: list[Any], rng: random.Random) -> None:
    if field.message_type is not None:
        values.add()
    elif kept and rng.random() < 0.7:
        at = rng.randrange(len(kept))
        values[at] = _boundary(field, kept[at], rng)
    else:
        values.append(_boundary(field, None, rng))


def _boundary(field: FieldDescriptor, current: Any, rng: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _odd_bytes(current or b"", rng)
    return rng.choice(_BOUNDARIES[field.cpp_type])


def _odd_bytes(current: bytes, rng: random.Random) -> bytes:
    """Of another length, or with an entry of four bytes that is out of range where the bytes are packed integers."""
    entries = [b"\xff\xff\xff\xff", b"\xfe\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x40\x00\x00\x00"]
    at = rng.randrange(len(current) // 4 + 1) * 4
    return rng.choice(
        (
            b"",
            current[:-1],
            current + b"\x00",
            current * 2,
            current[: at // 2],
            rng.randbytes(len(current)),
            current[:at] + rng.choice(entries) + current[at + 4 :],
            current[:at] + rng.choice(entries) + current[at + 4 :],
        )
    )
