import pytest

from kvferry.cache.errors import ConfigError
from kvferry.transfer.control.addresses import Address, AddressError, checked_address, parse_address


@pytest.mark.parametrize(
    "text,address,shown,loopback",
    [
        ("127.0.0.1:5000", Address("127.0.0.1", 5000), "127.0.0.1:5000", True),
        ("127.8.9.1:0", Address("127.8.9.1", 0), "127.8.9.1:0", True),
        ("localhost:80", Address("127.0.0.1", 80), "127.0.0.1:80", True),
        ("[::1]:80", Address("::1", 80), "[::1]:80", True),
        ("[::]:80", Address("::", 80), "[::]:80", False),
        ("10.0.0.1:65535", Address("10.0.0.1", 65535), "10.0.0.1:65535", False),
        ("localhost.example.org:80", Address("localhost.example.org", 80), "localhost.example.org:80", False),
    ],
)
def test_address_is_read_and_shown(text: str, address: Address, shown: str, loopback: bool) -> None:
    assert parse_address(text) == address
    assert str(address) == shown
    assert address.is_loopback is loopback


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":80", "host:-1", "host:65536", "host:8o", "::1:80", "[::1]", "a b:80", "unix:/x:1"),
        *("h:²", "h:" + "1" * 5000, "[host]:80", "[1.2.3.4]:80", "h:80\n", "h\n:80", "[fe80::1%lo]:80", "[]:80"),
    ],
)
def test_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        parse_address(text)


@pytest.mark.parametrize("text", ["0.0.0.0:80", "worker-7:80", "[::]:80", "192.0.2.1:80"])
def test_address_beyond_this_machine_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        checked_address(text, purpose="listen on")
    assert str(caught.value) == f"address {text!r}: {caught.value.rule}"
    assert caught.value.rule == (
        "will not listen on it without encryption: until TLS exists, only loopback addresses (127.0.0.1, localhost, "
        "[::1]) are allowed"
    )
    assert checked_address(text, purpose="listen on", allow_insecure=True) == parse_address(text)
