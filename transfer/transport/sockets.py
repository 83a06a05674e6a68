"""The TCP connections of this process: what was read from each, and how much its other end can have sent.

Found through the open files of this process, since a connection that was reset is in no table of the kernel although
bytes can still be read from it.
"""

import array
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.transfer.transport.quiescence import Stream

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_FILES = Path("/proc/self/fd")

_LISTEN = 10
_HEARING = (1, 4, 5)
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2: states in which the other end may send more."""
_INFO = struct.Struct("=B23xI100xQ")
"""State, connections to be accepted (of a listening socket) and bytes received in the kernel's `tcp_info`."""
_MULTIPATH = 262


class Looked(NamedTuple):
    """One TCP socket of ours as the kernel describes it.

    Attributes:
        waiting: connections nobody has accepted yet, if it listens.
        received: bytes that arrived; after the end of the stream one more.
        unread: those of them we have not read.
    """

    inode: int
    state: int
    waiting: int
    received: int
    unread: int
    local: tuple[Address, int] | None
    remote: tuple[Address, int] | None


def streams(same_network: bool) -> list[Stream]:
    """All connections of this process, and those of its listening sockets on which one waits to be accepted.

    Args:
        same_network: the other ends that matter are in our network namespace. Without, nothing bounds what a connection
            whose other end is not there was sent.

    Raises:
        OSError, ValueError: the kernel answered something unexpected.
    """
    # Before the sockets are looked at: bytes that arrive in between are then counted twice, and never left out.
    pending = pending_bytes(_read(table) for table in _TABLES)
    return [_stream(ours, pending, same_network) for ours in _own_sockets() if not _is_idle_listener(ours)]


def _read(table: Path) -> str:
    try:
        return table.read_text()
    except FileNotFoundError:
        return ""  # a kernel without this version of IP


def pending_bytes(tables: Iterable[str]) -> dict[tuple[str, str], int]:
    """Per connection (local and remote address, as the kernel writes them) the bytes sent and not acknowledged."""
    pending = {}
    for table in tables:
        for line in table.splitlines()[1:]:
            _, local, remote, _, queues, _ = line.split(maxsplit=5)
            pending[local, remote] = int(queues.partition(":")[0], 16)
    return pending


def _stream(ours: Looked, pending: Mapping[tuple[str, str], int], same_network: bool) -> Stream:
    if ours.state == _LISTEN:
        return Stream(ours.inode, f"{ours.waiting} connections not accepted yet", 0, None)
    if ours.remote is None or ours.local is None or ours.state not in _HEARING:
        # Nothing more arrives. `received` may count the end of the stream, so only none unread is all read.
        return Stream(ours.inode, _title(ours), 0 if ours.unread else ours.received, ours.received)
    sent = _pending_to(ours.local, ours.remote, pending)
    if sent is None and same_network and not _is_of_this_machine(ours.remote[0]):
        sent = 0
    return Stream(ours.inode, _title(ours), ours.received - ours.unread, None if sent is None else ours.received + sent)


def _pending_to(
    local: tuple[Address, int], remote: tuple[Address, int], pending: Mapping[tuple[str, str], int]
) -> int | None:
    """Bytes under way to us; None when the other end is not in the tables.

    A missing end of this machine went away a moment ago and we have not heard of it, or the tables changed while they
    were read: ask again.
    """
    names = zip(_names(*remote), _names(*local), strict=False)
    return next((pending[name] for name in names if name in pending), None)


def _names(address: Address, port: int) -> list[str]:
    """How the kernel's tables write an address: words in the machine's order. IPv4 has a name in either table."""
    words = struct.unpack(f"={len(address.packed) // 4}I", address.packed)
    name = "".join(f"{word:08X}" for word in words) + f":{port:04X}"
    return [name, *_names(_mapped(address), port)] if isinstance(address, ipaddress.IPv4Address) else [name]


def _mapped(address: ipaddress.IPv4Address) -> ipaddress.IPv6Address:
    return ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)


def _is_of_this_machine(address: Address) -> bool:
    """Whether an address belongs to our network namespace: only those can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _title(ours: Looked) -> str:
    return f"the socket to {ours.remote[0]} port {ours.remote[1]}" if ours.remote else "a socket that was reset"


def _is_idle_listener(ours: Looked) -> bool:
    return ours.state == _LISTEN and not ours.waiting


def _own_sockets() -> Iterator[Looked]:
    for name in os.listdir(_FILES):
        ours = _borrowed(int(name))
        if ours is not None:
            with ours:
                looked = _looked(ours)
            if looked is not None:
                yield looked


def _borrowed(descriptor: int) -> socket.socket | None:
    """A socket of this process under one more descriptor; None for another file, or one closed by now."""
    try:
        is_socket = os.readlink(_FILES / str(descriptor)).startswith("socket:")
        return _duplicate(descriptor) if is_socket else None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EBADF):
            return None
        raise


def _duplicate(descriptor: int) -> socket.socket:
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _looked(ours: socket.socket) -> Looked | None:
    """What the kernel says of a socket; None unless it is of TCP."""
    if ours.family not in (socket.AF_INET, socket.AF_INET6) or ours.type != socket.SOCK_STREAM:
        return None
    if ours.proto == _MULTIPATH:
        raise ValueError("a socket of multipath TCP, of which it cannot be said what is under way")
    if ours.proto != socket.IPPROTO_TCP:
        return None
    state, waiting, received = _INFO.unpack(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    inode = os.fstat(ours.fileno()).st_ino
    if state == _LISTEN:
        return Looked(inode, state, waiting, 0, 0, None, None)
    return Looked(inode, state, 0, received, _unread(ours), _address(ours.getsockname), _address(ours.getpeername))


def _unread(ours: socket.socket) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(ours, termios.FIONREAD, count)
    return count[0]


def _address(ask: Callable[[], Any]) -> tuple[Address, int] | None:
    """IPv4 is told as IPv4 also on a socket of IPv6; None without an address."""
    try:
        host, port = ask()[:2]
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            return None
        raise
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, port
