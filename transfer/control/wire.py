"""gRPC settings that client and server share, and the one place where channels are made."""

import grpc

from kvferry.transfer.control.addresses import checked_address

MAX_MESSAGE_BYTES = 16 << 20
KEEPALIVE_SECONDS = 5.0
"""A silent connection is probed after this long, and given up when the probe gets no answer for as long again."""

WRITE_SECONDS = 30.0
"""A caller that reads nothing for this long is given up."""

Options = list[tuple[str, int | str]]


def common_options(keepalive_seconds: float) -> Options:
    """The ping timeout counts beside the keepalive timeout; its default hides a stopped peer for a minute."""
    keepalive_ms = int(keepalive_seconds * 1000)
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 32 << 10),
        ("grpc.absolute_max_metadata_size", 64 << 10),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(keepalive_seconds: float = KEEPALIVE_SECONDS) -> Options:
    """Port sharing is off, so that a port in use is an error; clients may probe as often as they do."""
    return [
        *common_options(keepalive_seconds),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(keepalive_seconds * 500)),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def client_options(keepalive_seconds: float = KEEPALIVE_SECONDS) -> Options:
    """One connection per channel object, never through a proxy, redialled within seconds."""
    return [
        *common_options(keepalive_seconds),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def open_channel(
    endpoint: str, *, allow_insecure: bool = False, keepalive_seconds: float = KEEPALIVE_SECONDS
) -> grpc.aio.Channel:
    """A channel to HOST:PORT; it connects at the first call. Must be made and used on one running loop.

    Raises: ConfigError: malformed, or not a loopback address while `allow_insecure` is false.
    """
    address = checked_address(endpoint, purpose="connect to", allow_insecure=allow_insecure)
    return grpc.aio.insecure_channel(str(address), options=client_options(keepalive_seconds))
