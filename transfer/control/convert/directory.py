"""Members and snapshots of the directory."""

from collections.abc import Sequence

from kvferry.cache.errors import RemoteProtocolError
from kvferry.transfer.control.addresses import AddressError, parse_address
from kvferry.transfer.control.convert import checks, common
from kvferry.transfer.control.handlers import Snapshot
from kvferry.transfer.inference import DirectoryEntry
from kvferry.transfer.types import WorkerId
from kvferry.v1 import common_pb2
from kvferry.v1 import directory_pb2 as pb

MAX_MEMBERS = 1 << 14
MAX_PAIRED = 1 << 12


@checks.outgoing
def entry_to_wire(entry: DirectoryEntry) -> pb.Entry:
    return pb.Entry(
        worker=common.worker_to_wire(entry.worker),
        role=common.role_to_wire(entry.role),
        endpoint=entry.endpoint,
        model=entry.model,
        paired=[common.worker_to_wire(worker) for worker in entry.paired],
    )


def entry_from_wire(message: pb.Entry) -> DirectoryEntry:
    checks.present(message, "worker")
    return DirectoryEntry(
        worker=common.worker_from_wire(message.worker),
        role=common.role_from_wire("Entry.role", message.role),
        endpoint=_endpoint(message.endpoint),
        model=checks.text("Entry.model", message.model),
        paired=paired_from_wire("Entry.paired", message.paired),
    )


def paired_from_wire(field: str, workers: Sequence[common_pb2.WorkerId]) -> tuple[WorkerId, ...]:
    checks.sized(field, workers, high=MAX_PAIRED)
    return tuple(common.worker_from_wire(worker) for worker in workers)


@checks.outgoing
def snapshot_to_wire(snapshot: Snapshot) -> pb.WatchResponse:
    return pb.WatchResponse(version=snapshot.version, members=[entry_to_wire(entry) for entry in snapshot.members])


def snapshot_from_wire(message: pb.WatchResponse) -> Snapshot:
    checks.sized("WatchResponse.members", message.members, high=MAX_MEMBERS)
    return Snapshot(message.version, tuple(entry_from_wire(entry) for entry in message.members))


def _endpoint(value: str) -> str:
    """HOST:PORT that something can connect to."""
    try:
        port = parse_address(checks.name("Entry.endpoint", value)).port
    except AddressError as error:
        raise RemoteProtocolError(f"Entry.endpoint: {error}") from None
    checks.require(port > 0, "Entry.endpoint", value, "nothing can connect to port 0")
    return value
