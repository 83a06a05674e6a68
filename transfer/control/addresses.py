"""HOST:PORT, and what may be reached without encryption."""

import ipaddress
from typing import NamedTuple

from kvferry.cache.errors import ConfigError

MAX_PORT = 65535


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

    Raises: ConfigError: the text is no such thing.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise ConfigError(f"address {text!r}: expected HOST:PORT with a port from 0 to {MAX_PORT}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"address {text!r}: put an IPv6 host in brackets, as in [::1]:{port}")
    if not host or any(character in host for character in "/ []%"):
        raise ConfigError(f"address {text!r}: the host is missing or malformed, expected HOST:PORT")
    return Address("127.0.0.1" if host == "localhost" else host, int(port))


def checked_address(text: str, *, purpose: str, allow_insecure: bool) -> Address:
    """Parse an address and refuse plain text beyond this machine.

    Args:
        purpose: "listen on" or "connect to", for the message.

    Raises: ConfigError: malformed, or not a loopback address while `allow_insecure` is false.
    """
    address = parse_address(text)
    if not (address.is_loopback or allow_insecure):
        raise ConfigError(
            f"will not {purpose} {text} without encryption: only loopback addresses (127.0.0.1, localhost, [::1]) are "
            "allowed; set allow_insecure to accept plain text on a trusted network"
        )
    return address
