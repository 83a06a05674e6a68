"""The bytes attached to every post, and what a side learns from them: which slices of which attempt are over."""

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.types import TransferKey

_FORMAT = struct.Struct("<4s16sIQQII")
_MAGIC = b"kvf2"


class Notice(NamedTuple):
    """One slice is over. It is for one life of one worker and one grant only; `slice_index` is in [0, num_slices).

    Attributes:
        incarnation: of the worker it is for.
        fence: of the grant.
    """

    key: TransferKey
    incarnation: int
    fence: int
    slice_index: int
    num_slices: int

    def pack(self) -> bytes:
        """48 bytes, little endian: magic, transfer id, attempt, incarnation, fence, index, count."""
        return _FORMAT.pack(
            _MAGIC,
            bytes.fromhex(self.key.transfer_id),
            self.key.attempt,
            self.incarnation,
            self.fence,
            self.slice_index,
            self.num_slices,
        )

    @classmethod
    def unpack(cls, payload: bytes) -> "Notice":
        """Raises RemoteProtocolError when the bytes are not a notice."""
        if len(payload) != _FORMAT.size or payload[:4] != _MAGIC:
            raise RemoteProtocolError(f"notification of {len(payload)} bytes is not a kvferry notice")
        _, raw_id, attempt, incarnation, fence, index, count = _FORMAT.unpack(payload)
        if index >= count:
            raise RemoteProtocolError(f"notice for slice {index} of {count}")
        return cls(TransferKey(raw_id.hex(), attempt), incarnation, fence, index, count)


@dataclass(eq=False)
class Landing:
    """Which posts of the other side are over, as its notices say.

    Attributes:
        num_slices: how many there are; None until somebody says so.
    """

    num_slices: int | None = None
    landed: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.landed) == self.num_slices

    def expect(self, num_slices: int) -> None:
        """The other side says how many slices there are. Raises RemoteProtocolError when it said otherwise before."""
        if self.num_slices not in (None, num_slices):
            raise RemoteProtocolError(f"{num_slices} slices now, {self.num_slices} before")
        self.num_slices = num_slices

    def note(self, notice: Notice) -> None:
        """Count a slice. Raises RemoteProtocolError as `expect`."""
        self.expect(notice.num_slices)
        self.landed.add(notice.slice_index)

    def __str__(self) -> str:
        expected = "an unknown number of" if self.num_slices is None else self.num_slices
        return f"{len(self.landed)} of {expected} slices landed"
