"""The bytes attached to every write: which slice of which attempt landed."""

import struct
from typing import NamedTuple

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.types import TransferKey

_FORMAT = struct.Struct("<4s16sIQII")
_MAGIC = b"kvf1"


class Notice(NamedTuple):
    """One slice landed. It is for one incarnation of the receiver only; `slice_index` is in [0, num_slices)."""

    key: TransferKey
    receiver_incarnation: int
    slice_index: int
    num_slices: int

    def pack(self) -> bytes:
        """40 bytes, little endian: magic, transfer id, attempt, incarnation, index, count."""
        return _FORMAT.pack(
            _MAGIC,
            bytes.fromhex(self.key.transfer_id),
            self.key.attempt,
            self.receiver_incarnation,
            self.slice_index,
            self.num_slices,
        )

    @classmethod
    def unpack(cls, payload: bytes) -> "Notice":
        """Raises RemoteProtocolError when the bytes are not a notice."""
        if len(payload) != _FORMAT.size or payload[:4] != _MAGIC:
            raise RemoteProtocolError(f"notification of {len(payload)} bytes is not a kvferry notice")
        _, raw_id, attempt, incarnation, index, count = _FORMAT.unpack(payload)
        if index >= count:
            raise RemoteProtocolError(f"notice for slice {index} of {count}")
        return cls(TransferKey(raw_id.hex(), attempt), incarnation, index, count)
