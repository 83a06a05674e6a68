"""HOST:PORT, and what may be reached without encryption."""

import ipaddress
import re
from typing import NamedTuple

from kvferry.cache.errors import ConfigError

MAX_PORT = 65535

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[(?P<ipv6>[0-9A-Fa-f:.]+)\]):(?P<port>[0-9]{1,5})")


class AddressError(ConfigError):
    """An address that cannot be used; `rule` says why without repeating the address."""

    def __init__(self, text: str, rule: str) -> None:
        super().__init__(f"address {text!r}: {rule}")
        self.rule = rule


class Address(NamedTuple):
    """Where a server listens. Port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_literal(self) -> bool:
        """The host is an address and not a name."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach it. Names other than localhost are not resolved and count as remote."""
        return self.is_literal and ipaddress.ip_address(self.host).is_loopback


def parse_address(text: str) -> Address:
    """Read HOST:PORT; an IPv6 host stands in brackets, and localhost means 127.0.0.1.

    Raises: AddressError: the text is no such thing.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > MAX_PORT or not _is_host(match["host"], match["ipv6"]):
        raise AddressError(
            text, f"must be HOST:PORT with a port from 0 to {MAX_PORT}; an IPv6 host stands in brackets, as in [::1]:80"
        )
    host = match["ipv6"] or match["host"]
    return Address("127.0.0.1" if host == "localhost" else host, int(match["port"]))


def checked_address(text: str, *, purpose: str, allow_insecure: bool = False) -> Address:
    """Parse an address and refuse plain text beyond this machine.

    Args:
        purpose: "listen on" or "connect to", for the message.

    Raises: AddressError: malformed, or not a loopback address while `allow_insecure` is false.
    """
    address = parse_address(text)
    if not (address.is_loopback or allow_insecure):
        raise AddressError(
            text,
            f"will not {purpose} it without encryption: until TLS exists, only loopback addresses (127.0.0.1, "
            "localhost, [::1]) are allowed",
        )
    return address


def _is_host(host: str, ipv6: str | None) -> bool:
    """A host in brackets must be an IPv6 address; every other one may be a name."""
    return ipv6 is None or (":" in ipv6 and Address(ipv6, 0).is_literal)
