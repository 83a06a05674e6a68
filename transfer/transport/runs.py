"""Runs of memory: checked once, addressed by index, paired for a post."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.cache.errors import TransportError
from kvferry.transfer.transport.base import DescriptorList, Descriptors, Indices
from kvferry.transfer.transport.memory import MemoryKind, RegionTable

Rows = npt.NDArray[np.uint64]
"""Runs with the region each lies in. Shapes: [n, 4], columns address, length in bytes, device index, region."""

_ADDRESS, _LENGTH, _REGION = 0, 1, 3


class RunList(DescriptorList):
    """Runs of one agent's memory, alive while its home set holds it.

    Attributes:
        peer: whose memory it is; None for our own.
    """

    def __init__(self, home: set["RunList"], peer: str | None, rows: Rows, kind: MemoryKind) -> None:
        self._home = home
        self.peer = peer
        self.rows = rows
        self.kind = kind
        home.add(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        state = "" if self in self._home else ", released"
        return f"<{len(self)} {self.kind} runs of {self.peer or 'our own memory'}{state}>"

    def release(self) -> None:
        self._home.discard(self)


def checked_rows(backend: str, table: RegionTable, descriptors: Descriptors) -> Rows:
    """Descriptors with their regions.

    Raises:
        TransportError: a wrong shape, no run, an empty run, or a run outside the memory of `table`.
    """
    if descriptors.ndim != 2 or descriptors.shape[1] != 3 or descriptors.dtype != np.uint64 or not len(descriptors):
        raise TransportError(
            backend,
            "INVALID",
            f"descriptors are {descriptors.dtype} {descriptors.shape}: at least one row of 3 uint64 is needed",
        )
    if not descriptors[:, _LENGTH].all():
        raise TransportError(backend, "INVALID", f"run {int(np.argmin(descriptors[:, _LENGTH]))} is empty")
    return np.column_stack((descriptors, table.locate(descriptors)))


class RunPairs(NamedTuple):
    """Local runs and the remote run of each, neighbours merged.

    Shapes: local and remote [num merged, 4], of equal lengths.
    """

    local: Rows
    remote: Rows
    num_bytes: int

    def __len__(self) -> int:
        return len(self.local)


def pair_runs(
    backend: str, local: RunList, local_indices: Indices, remote: RunList, remote_indices: Indices
) -> RunPairs:
    """Pair runs by index and merge pairs that continue the pair before them on both sides.

    Raises:
        TransportError: no index, different numbers of indices, an index out of range, or a pair of unequal lengths.
    """
    if len(local_indices) != len(remote_indices) or not len(local_indices):
        raise TransportError(
            backend,
            "INVALID",
            f"{len(local_indices)} local and {len(remote_indices)} remote indices: both need the same number, above 0",
        )
    sources = _taken(backend, local, local_indices)
    targets = _taken(backend, remote, remote_indices)
    unequal = sources[:, _LENGTH] != targets[:, _LENGTH]
    if unequal.any():
        first = int(np.argmax(unequal))
        raise TransportError(
            backend,
            "INVALID",
            f"pair {first} has {sources[first, _LENGTH]} local and {targets[first, _LENGTH]} remote bytes",
        )
    return _merged(sources, targets)


def _taken(backend: str, runs: RunList, indices: Indices) -> Rows:
    if indices.dtype != np.int32 or indices.ndim != 1:
        raise TransportError(backend, "INVALID", f"indices are {indices.dtype} {indices.shape}: 1-D int32 is needed")
    try:
        # Seen as unsigned, so that a negative index is out of range and does not count from the end.
        return runs.rows.take(indices.view(np.uint32), axis=0)
    except IndexError:
        raise TransportError(
            backend, "INVALID", f"index outside 0..{len(runs) - 1}: found {indices.min()} to {indices.max()}"
        ) from None


def _merged(sources: Rows, targets: Rows) -> RunPairs:
    heads = np.concatenate(([True], ~(_continues(sources) & _continues(targets))))
    starts = np.flatnonzero(heads)
    lengths = np.add.reduceat(sources[:, _LENGTH], starts)
    local, remote = sources[starts], targets[starts]
    local[:, _LENGTH] = remote[:, _LENGTH] = lengths
    return RunPairs(local, remote, int(lengths.sum()))


def _continues(rows: Rows) -> npt.NDArray[np.bool_]:
    """Whether each run but the first starts where the one before it ends, in the same region."""
    ends = rows[:-1, _ADDRESS] + rows[:-1, _LENGTH]
    follows: npt.NDArray[np.bool_] = (ends == rows[1:, _ADDRESS]) & (rows[:-1, _REGION] == rows[1:, _REGION])
    return follows
