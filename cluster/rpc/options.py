"""gRPC options of every server and channel of the data plane."""

from __future__ import annotations

# A peer that vanished silently (power, network) is detected after at most their sum.
_KEEPALIVE_TIME_MS = 5_000
_KEEPALIVE_TIMEOUT_MS = 5_000

# Room for the bytes of a frame that do not belong to its items.
_FRAME_SLACK_BYTES = 64 * 1024


def channel_options(max_frame_bytes: int) -> list[tuple[str, int]]:
    """Options of a client channel that may receive frames of max_frame_bytes."""
    return [
        *_common(max_frame_bytes),
        ("grpc.http2.max_pings_without_data", 0),
        # A shared subchannel would apply a dead worker's back-off to its successor on the port.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]


def public_server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of the public service's own server; it reads no longer message."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        # A client that vanished without a word holds its request for no longer than two of them.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # So that clients may notice within seconds that this server is silent.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        # Replicas on one node share the port, also while one replaces another.
        ("grpc.so_reuseport", 1),
    ]


def server_options(max_frame_bytes: int) -> list[tuple[str, int]]:
    """Options of a server that may receive frames of max_frame_bytes."""
    return [
        *_common(max_frame_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        # Two processes on one port would split its connections at random.
        ("grpc.so_reuseport", 0),
    ]


def _common(max_frame_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_frame_bytes + _FRAME_SLACK_BYTES),
        ("grpc.max_send_message_length", max_frame_bytes + _FRAME_SLACK_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
