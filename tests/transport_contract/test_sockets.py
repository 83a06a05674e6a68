"""What is said of TCP connections of this process, over real ones."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.transfer.transport import sockets
from kvferry.transfer.transport.quiescence import Drain, Fact, Stream
from kvferry.transfer.transport.sockets import pending_bytes, streams
from tests.helpers import wait_until

PLACES = [
    pytest.param(socket.AF_INET, "127.0.0.1", "127.0.0.1", id="IPv4"),
    pytest.param(socket.AF_INET6, "::1", "::1", id="IPv6"),
    pytest.param(socket.AF_INET6, "::", "127.0.0.1", id="IPv4-at-an-IPv6-listener"),
]


@contextmanager
def connection(
    family: int = socket.AF_INET, place: str = "127.0.0.1", target: str = "127.0.0.1"
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our end and the other one."""
    with socket.socket(family) as listener:
        if place == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind((place, 0))
        except OSError:
            pytest.skip(f"this machine has no {place}")
        listener.listen()
        other = socket.create_connection((target, listener.getsockname()[1]))
        ours, _ = listener.accept()
    with ours, other:
        yield ours, other


def of(ours: socket.socket, same_network: bool = True) -> Stream | None:
    inode = os.fstat(ours.fileno()).st_ino
    return next((stream for stream in streams(same_network) if stream.inode == inode), None)


def fill(other: socket.socket) -> int:
    """Send until the kernel takes no more. Returns how many bytes it took."""
    other.setblocking(False)
    sent = 0
    try:
        while True:
            sent += other.send(bytes(1 << 20))
    except BlockingIOError:
        return sent


def read(ours: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(ours.recv(min(num_bytes, 1 << 20)))


def look(drain: Drain, ours: socket.socket) -> Fact:
    found = of(ours)
    return drain.look([found] if found else [])


@pytest.mark.parametrize("family, place, target", PLACES)
def test_stream_counts_what_was_read_and_bounds_what_was_sent(family: int, place: str, target: str) -> None:
    with connection(family, place, target) as (ours, other):
        sent = fill(other)
        read(ours, 1000)
        found = of(ours)
        assert found is not None
        assert found.read == 1000
        # Some is in our kernel's buffer and some in the other end's.
        assert found.sent is not None
        assert found.sent >= sent
        read(ours, sent - 1000)
        wait_until(lambda: of(ours) == found._replace(read=sent, sent=sent), 10.0, "all is acknowledged")


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_bytes_of_a_closed_end_count_until_they_are_read(reset: bool) -> None:
    with connection() as (ours, other):
        drain = Drain()
        sent = fill(other)
        if reset:
            # A socket closed with bytes unread resets its connection, which is then in no table of the kernel.
            ours.send(b"unread")
            wait_until(lambda: (found := of(other)) is not None and found.sent == 6, 10.0, "it arrives")
        other.close()
        assert not look(drain, ours).holds
        read(ours, 1000)
        assert not look(drain, ours).holds
        left = sent - 1000
        try:
            while left and (part := ours.recv(1 << 20)):
                left -= len(part)
        except ConnectionResetError:
            pass
        assert (left > 0) == reset
        wait_until(lambda: look(drain, ours).holds, 10.0, "all that can arrive was read")


def test_last_byte_before_the_end_counts() -> None:
    """The kernel counts the end of a stream as one more byte received."""
    with connection() as (ours, other):
        drain = Drain()
        other.send(b"ab")
        wait_until(lambda: (found := of(ours)) is not None and found.sent == 2, 10.0, "two bytes are here")
        assert not look(drain, ours).holds
        other.close()
        read(ours, 1)
        assert not look(drain, ours).holds
        read(ours, 1)
        assert look(drain, ours).holds


def test_closing_our_end_drains_it() -> None:
    with connection() as (ours, other):
        drain = Drain()
        other.send(b"ab")
        assert not look(drain, ours).holds
        inode = os.fstat(ours.fileno()).st_ino
        ours.close()
        assert inode not in {stream.inode for stream in streams(True)}


def test_connection_held_open_by_another_process_counts_as_any() -> None:
    """A child of the writer may have inherited its sockets: then nothing closes, and what was sent still arrives."""
    with connection() as (ours, other):
        drain = Drain()
        sent = fill(other)
        wait_until(lambda: (found := of(ours)) is not None and found.sent == sent, 10.0, "nothing is counted twice")
        assert not look(drain, ours).holds
        read(ours, sent)
        other.setblocking(True)
        other.send(b"later")
        wait_until(lambda: (found := of(ours)) is not None and found.sent == sent + 5, 10.0, "more arrives")
        assert look(drain, ours).holds


def test_connection_nobody_accepted_yet_has_no_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert of(listener) is None
        with socket.create_connection(listener.getsockname()):
            wait_until(lambda: of(listener) is not None, 10.0, "the connection waits")
            found = of(listener)
            assert found is not None
            assert found.sent is None
            listener.accept()[0].close()
            assert of(listener) is None


def test_other_end_that_is_not_there_bounds_nothing_unless_it_is_on_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "_TABLES", ())
    with connection() as (ours, other):
        other.send(b"abc")
        wait_until(lambda: (found := of(ours)) is not None and found.sent is None, 10.0, "no bound")
        monkeypatch.setattr(sockets, "_is_of_this_machine", lambda _: False)
        wait_until(lambda: (found := of(ours)) is not None and found.sent == 3, 10.0, "three bytes are here")
        found = of(ours, same_network=False)
        assert found is not None
        assert found.sent is None


def test_addresses_of_this_machine() -> None:
    known = {"127.0.0.1": True, "127.8.9.10": True, "192.0.2.77": False, "2001:db8::77": False}
    found = {text: sockets._is_of_this_machine(sockets.ipaddress.ip_address(text)) for text in known}
    assert {text: answer for text, answer in found.items() if ":" not in text} == {
        text: answer for text, answer in known.items() if ":" not in text
    }


@pytest.mark.parametrize("table", ["head\nx", "head\n1 2 3\n", "head\n0: a b 01 zz:00 rest"])
def test_odd_table_raises(table: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        pending_bytes([table])


def test_closed_descriptors_and_other_files_are_passed_over() -> None:
    end, start = os.pipe()
    os.close(start)
    assert sockets._borrowed(end) is None
    os.close(end)
    assert sockets._borrowed(end) is None
    left, right = socket.socketpair()
    with left, right, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        assert (of(left), of(datagrams)) == (None, None)
