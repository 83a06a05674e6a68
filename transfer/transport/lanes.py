"""What UCX really used, read from its own log.

UCX prints a table per kind of operation and endpoint configuration when it first needs one:

    +--------+-------------+-----------------------------------------+
    | prefill-0 intra-node cfg#1                                     |    worker, place and configuration
    | remote memory write by ucp_put*(multi) from host memory to host |   operation
    +--------+-------------+-----------------------------------------+
    | Range  | Description |                 Config                  |
    +--------+-------------+-----------------------------------------+
    | 0..inf | zero-copy   | cma/memory                              |    sizes in bytes, how, over what
    +--------+-------------+-----------------------------------------+

Tables of writes and of reads are kept; warnings and errors go to Python's logging.
"""

import ctypes
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from kvferry.transfer.transport.base import Operation

log = logging.getLogger(__name__)

UNKNOWN = "unknown"

MAX_TABLES = 256
MAX_ROWS = 64
MAX_LINE_BYTES = 4096
MAX_FORWARDED_LINES = 64
"""Lines of UCX passed to logging per refresh."""

_CHUNK_BYTES = 1 << 18
_MAX_CHUNKS = 16
_WORKER_NAME_BYTES = 31
"""UCX cuts the names of its workers to this length."""

_LANES = {
    "cma": "cma",
    "tcp": "tcp",
    "posix": "shm",
    "sysv": "shm",
    "xpmem": "shm",
    "knem": "shm",
    "cuda_ipc": "cuda_ipc",
    "self": "memcpy",
    "cuda_copy": "memcpy",
}
_WITHOUT_RDMA = {*_LANES, "sm", "shm", "cuda", "gdr_copy"}
"""Names for UCX_TLS that open no network adapter."""
_RDMA = re.compile(r"(rc|dc|ud|ib|srd|gga)(_|$)")
_RESOURCE = re.compile(r"(?:^|\s)([a-z]\w*)/")
_LINE = re.compile(r"\[[^\]]*\] \[[^\]]*\] +(.*)")
_PROBLEM = re.compile(r"UCX\s+(WARN|ERROR|FATAL)\s+(.*)")
_CONNECTION = re.compile(r"(.*) (\S+ cfg#\d+)")
_SIZES = re.compile(r"(\d+)(?:\.\.(\d+|inf))?")
_OPERATIONS = {
    "remote memory write by ucp_put": Operation.WRITE,
    "remote memory read by ucp_get": Operation.READ,
}
_OWN_MEMORY = "self "
_HEADERS = ("Range", "Count")


def prepare_environment(environ: MutableMapping[str, str], log_path: Path) -> Path | None:
    """Make UCX tell what it does. Call it before the first agent of the process is made.

    What the user has set stays. Connecting is made non-blocking: UCX would otherwise wait for the kernel to give up on
    a peer that does not answer (about two minutes), on the thread that moves everyone's data.

    Returns: where UCX writes, to be given to the transport; None when the user sends its log somewhere else.
    """
    defaults = {
        "NIXL_LOG_LEVEL": "ERROR",
        "UCX_PROTO_INFO": "y",
        "UCX_LOG_FILE": str(log_path),
        "UCX_LOG_FILE_SIZE": "4M",
        "UCX_TCP_CONN_NB": "y",
        "UCX_TCP_SYN_CNT": "3",
    }
    for name, value in defaults.items():
        environ.setdefault(name, value)
    return log_path if environ["UCX_LOG_FILE"] == str(log_path) else None


def wire_fingerprint(environ: Mapping[str, str]) -> str:
    """Equal for agents that a peer reaches over the same lanes: one machine, one namespace, the same UCX settings."""
    quiet = ("UCX_LOG", "UCX_PROTO_INFO")
    settings = sorted(item for item in environ.items() if item[0].startswith("UCX_") and not item[0].startswith(quiet))
    places = [_read_text("/proc/sys/kernel/random/boot_id"), _namespace("net"), _namespace("pid"), _namespace("ipc")]
    return hashlib.sha256(repr((places, settings)).encode()).hexdigest()[:16]


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def possible_lanes(environ: Mapping[str, str], *, has_rdma: bool, on_device: bool) -> frozenset[str]:
    """Lanes a peer on this machine may have used to our memory, whatever its own settings are.

    Args:
        environ: our own settings: a network adapter we do not open knows no key of our memory.
        has_rdma: this machine has adapters for it.
        on_device: we registered memory of a GPU.
    """
    allowed = set(environ.get("UCX_TLS", "all").split(","))
    lanes = {"cma", "shm", "tcp", "memcpy"}
    if has_rdma and not allowed <= _WITHOUT_RDMA:
        lanes.add("rdma")
    return frozenset(lanes | ({"cuda_ipc"} if on_device else set()))


class Row(NamedTuple):
    """Runs of [start, end] bytes take these lanes; end is None without a limit."""

    start: int
    end: int | None
    lanes: frozenset[str]


class LaneTable(NamedTuple):
    """One table of the log.

    Attributes:
        worker: name of the agent, cut by UCX.
        connection: place and number of the endpoint configuration, e.g. "intra-node cfg#1".
        title: names the operation and both kinds of memory.
    """

    worker: str
    connection: str
    operation: Operation
    title: str
    rows: tuple[Row, ...]


def lane_of(resource: str) -> str:
    """The lane of one UCX transport, "unknown" for one that is not known here."""
    return "rdma" if _RDMA.match(resource) else _LANES.get(resource, UNKNOWN)


def parse_tables(text: str) -> list[LaneTable]:
    """All complete tables of writes and reads in a log."""
    reader = TableReader()
    return [table for line in text.splitlines() for table in reader.feed(line)]


class TableReader:
    """Finds tables of writes and reads in lines of a log. Holds at most one table; a table cut short is dropped."""

    def __init__(self) -> None:
        self._block: list[list[str]] = []
        self._titles: tuple[str, str] | None = None

    def feed(self, line: str) -> Iterator[LaneTable]:
        """Take one line; give the table it completes, if any."""
        match = _LINE.match(line)
        content = match[1].strip() if match else ""
        if content.startswith("|"):
            self._block = [*self._block[: MAX_ROWS - 1], [cell.strip() for cell in content.strip("|").split("|")]]
        elif content.startswith("+"):
            yield from self._close_block()
        else:
            self._block, self._titles = [], None

    def _close_block(self) -> Iterator[LaneTable]:
        """A border ends titles, a header or rows; which of them its cells tell."""
        block, self._block = self._block, []
        if not block or block[0][0] in _HEADERS:
            return
        if len(block[0]) == 1:
            self._titles = (block[0][0], block[-1][0]) if len(block) == 2 else None
            return
        titles, self._titles = self._titles, None
        table = _table(titles, block) if titles else None
        if table is not None:
            yield table


def _table(titles: tuple[str, str], cells: list[list[str]]) -> LaneTable | None:
    connection = _CONNECTION.fullmatch(titles[0])
    operation = next((known for start, known in _OPERATIONS.items() if titles[1].startswith(start)), None)
    if connection is None or operation is None:
        return None
    rows = tuple(row for row in map(_row, cells) if row is not None)
    return LaneTable(connection[1], connection[2], operation, titles[1], rows) if rows else None


def _row(cells: list[str]) -> Row | None:
    sizes = _SIZES.fullmatch(cells[0])
    if sizes is None or len(cells) != 3:
        return None
    start = int(sizes[1])
    last = sizes[2] or sizes[1]
    lanes = frozenset(lane_of(resource) for resource in _RESOURCE.findall(cells[2]))
    return Row(start, None if last == "inf" else int(last), lanes or frozenset([UNKNOWN]))


class LaneLog:
    """The log of this process's UCX, read bit by bit. Memory is bounded whatever the log holds.

    Concurrency: one thread.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""
        self._reader = TableReader()
        self._tables: dict[tuple[str, str, str], LaneTable] = {}
        self.last_problem = ""
        """The latest warning or error of UCX; empty when there was none."""

    def refresh(self) -> None:
        """Read what UCX wrote since the last call. A missing log is an empty one."""
        if self._path is None:
            return
        # UCX writes through the C library's buffers, which are flushed late.
        ctypes.CDLL(None).fflush(None)
        forwarded = 0
        for line in self._new_lines():
            for table in self._reader.feed(line):
                self._keep(table)
            forwarded += self._forward(line, forwarded < MAX_FORWARDED_LINES)

    def connections(self, agent_name: str) -> frozenset[str]:
        """Endpoint configurations of an agent to other agents seen so far."""
        return frozenset(table.connection for table in self._of(agent_name))

    def lane(
        self,
        agent_name: str,
        run_bytes: int,
        connections: frozenset[str] = frozenset(),
        operation: Operation = Operation.WRITE,
    ) -> str:
        """Lanes an agent's posts with runs of this size take, joined by "+"; "unknown" when the log does not say.

        Args:
            connections: look at these endpoint configurations only; at all of the agent when empty.
        """
        lanes: set[str] = set()
        for table in self._of(agent_name):
            if table.operation is operation and (not connections or table.connection in connections):
                lanes.update(*(row.lanes for row in table.rows if _holds(row, run_bytes)))
        return "+".join(sorted(lanes)) or UNKNOWN

    def _of(self, agent_name: str) -> list[LaneTable]:
        worker = agent_name.encode()[:_WORKER_NAME_BYTES].decode(errors="ignore")
        return [
            table
            for table in self._tables.values()
            if table.worker == worker and not table.connection.startswith(_OWN_MEMORY)
        ]

    def _keep(self, table: LaneTable) -> None:
        self._tables[table.worker, table.connection, table.title] = table
        if len(self._tables) > MAX_TABLES:
            del self._tables[next(iter(self._tables))]

    def _forward(self, line: str, wanted: bool) -> int:
        problem = _PROBLEM.search(line)
        if problem is None:
            return 0
        self.last_problem = problem[2]
        if wanted:
            log.log(logging.WARNING if problem[1] == "WARN" else logging.ERROR, "UCX: %s", problem[2])
        return 1

    def _new_lines(self) -> Iterator[str]:
        for chunk in self._chunks():
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            self._partial = self._partial[:MAX_LINE_BYTES]
            for line in lines:
                yield line[:MAX_LINE_BYTES].decode(errors="replace")

    def _chunks(self) -> Iterator[bytes]:
        assert self._path is not None
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._partial = 0, b""  # UCX began its log anew
                file.seek(self._offset)
                for _ in range(_MAX_CHUNKS):
                    chunk = file.read(_CHUNK_BYTES)
                    if not chunk:
                        return
                    self._offset += len(chunk)
                    yield chunk
        except OSError:
            return


def _holds(row: Row, run_bytes: int) -> bool:
    return row.start <= run_bytes and (row.end is None or run_bytes <= row.end)
