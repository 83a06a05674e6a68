"""Registered memory, and the card that tells peers about it."""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.base import Descriptors
from kvferry.transfer.transport.processes import ProcessLife

MemoryKind = Literal["DRAM", "VRAM"]

MAX_METADATA_BYTES = 4 << 20
MAX_REGIONS = 4096
MAX_AGENT_NAME_BYTES = 255

_PREFIX = struct.Struct(">I")
_ADDRESS_LIMIT = 1 << 64


class Region(NamedTuple):
    """One stretch of registered memory: [address, address + num_bytes)."""

    address: int
    num_bytes: int
    device_index: int
    kind: MemoryKind


def region_of(backend: str, tensor: torch.Tensor) -> Region:
    """The memory of a tensor. Raises TransportError unless it is 1-D, uint8, contiguous and not empty."""
    if tensor.dim() != 1 or tensor.dtype is not torch.uint8 or not tensor.is_contiguous() or tensor.numel() == 0:
        raise TransportError(
            backend,
            "INVALID",
            f"cannot register a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}: "
            "a region is a 1-D contiguous uint8 tensor of at least one byte",
        )
    kind: MemoryKind = "VRAM" if tensor.is_cuda else "DRAM"
    return Region(tensor.data_ptr(), tensor.numel(), tensor.device.index or 0, kind)


class RegionTable:
    """Regions ordered by address, none overlapping another."""

    def __init__(self, backend: str, regions: Iterable[Region]) -> None:
        self._backend = backend
        self.regions = tuple(sorted(regions))
        self._starts = np.array([region.address for region in self.regions], np.uint64)
        self._sizes = np.array([region.num_bytes for region in self.regions], np.uint64)
        self._devices = np.array([region.device_index for region in self.regions], np.uint64)
        self._check_disjoint()

    def _check_disjoint(self) -> None:
        for left, right in zip(self.regions, self.regions[1:], strict=False):
            if left.address + left.num_bytes > right.address:
                raise TransportError(self._backend, "OVERLAP", f"{_text(left)} overlaps {_text(right)}")

    def locate(self, descriptors: Descriptors) -> npt.NDArray[np.uint64]:
        """Index of the region that holds each run.

        Shapes: result [n].

        Raises:
            TransportError: a run is not wholly inside one region, or the list mixes kinds of memory.
        """
        if not self.regions:
            raise TransportError(self._backend, "OUTSIDE", "no memory is registered, so no run can lie in it")
        addresses, lengths, devices = descriptors[:, 0], descriptors[:, 1], descriptors[:, 2]
        after = np.searchsorted(self._starts, addresses, side="right")
        found = np.maximum(after, 1) - 1
        offsets = addresses - self._starts[found]
        sizes = self._sizes[found]
        inside = (after > 0) & (offsets <= sizes) & (devices == self._devices[found])
        inside &= lengths <= sizes - np.minimum(offsets, sizes)
        if not inside.all():
            self._refuse(descriptors, int(np.argmin(inside)))
        self._check_one_kind(found)
        return found.astype(np.uint64)

    def kind(self, region: int) -> MemoryKind:
        return self.regions[region].kind

    def _refuse(self, descriptors: Descriptors, index: int) -> None:
        address, num_bytes, device = (int(value) for value in descriptors[index])
        raise TransportError(
            self._backend,
            "OUTSIDE",
            f"run {index} ({num_bytes} bytes at {address:#x}, device {device}) is not inside one registered region: "
            + ", ".join(_text(region) for region in self.regions[:8]),
        )

    def _check_one_kind(self, found: npt.NDArray[np.intp]) -> None:
        kinds = {self.kind(int(index)) for index in np.unique(found)}
        if len(kinds) > 1:
            raise TransportError(self._backend, "MIXED", "runs of one list lie in host and in device memory: split it")


def _text(region: Region) -> str:
    return f"{region.kind}:{region.device_index} {region.num_bytes} bytes at {region.address:#x}"


@dataclass(frozen=True)
class AgentCard:
    """What an agent tells its peers.

    Attributes:
        wire: equal for agents that are reached over the same lanes (same machine, same settings); may be empty.
        blob: what the library below wants to know of a peer.
        life: the process it lives in, if that can be told.
    """

    transport: str
    agent_name: str
    regions: tuple[Region, ...]
    wire: str = ""
    blob: bytes = b""
    life: ProcessLife | None = None

    def encode(self) -> bytes:
        """Length of the header (4 bytes, big-endian), the header as JSON, then the blob."""
        header = {
            "transport": self.transport,
            "agent": self.agent_name,
            "regions": self.regions,
            "wire": self.wire,
            "life": self.life,
        }
        text = json.dumps(header).encode()
        return _PREFIX.pack(len(text)) + text + self.blob

    @classmethod
    def decode(cls, transport: str, metadata: bytes) -> "AgentCard":
        """Read what `encode` wrote. Raises TransportError for anything else, or for another transport's card."""
        try:
            header, blob = _split(metadata)
            card = cls(
                str(header["transport"]),
                _checked_name(header["agent"]),
                tuple(_checked_region(value) for value in _checked_list(header["regions"])),
                str(header["wire"]),
                blob,
                _checked_life(header.get("life")),
            )
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise TransportError(transport, "METADATA", f"metadata of a peer cannot be read: {error!r}") from error
        if card.transport != transport:
            raise TransportError(transport, "METADATA", f"peer {card.agent_name} uses transport {card.transport!r}")
        return card


def _split(metadata: bytes) -> tuple[dict[str, Any], bytes]:
    if len(metadata) > MAX_METADATA_BYTES:
        raise ValueError(f"{len(metadata)} bytes, the limit is {MAX_METADATA_BYTES}")
    (length,) = _PREFIX.unpack_from(metadata)
    header = json.loads(metadata[_PREFIX.size : _PREFIX.size + length])
    if not isinstance(header, dict):
        raise TypeError("the header is not an object")
    return header, metadata[_PREFIX.size + length :]


def _checked_name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value.encode()) <= MAX_AGENT_NAME_BYTES:
        raise ValueError(f"agent name {value!r:.80}")
    return value


def _checked_life(value: object) -> ProcessLife | None:
    return None if value is None else ProcessLife.checked(value)


def _checked_list(value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_REGIONS:
        raise ValueError(f"regions are not a list of at most {MAX_REGIONS}")
    return value


def _checked_region(value: object) -> Region:
    match value:
        case [int(address), int(num_bytes), int(device), "DRAM" | "VRAM" as kind] if (
            address > 0 and num_bytes > 0 and address + num_bytes <= _ADDRESS_LIMIT and 0 <= device < 1 << 31
        ):
            return Region(address, num_bytes, device, kind)
    raise ValueError(f"region {value!r:.80}")
