"""gRPC options of every server and channel of ours."""

from __future__ import annotations

# As gRPC takes them.
Options = list[tuple[str, int]]

# A peer that vanished silently (power, network) is detected after at most their sum.
_KEEPALIVE_TIME_MS = 5_000
_KEEPALIVE_TIMEOUT_MS = 5_000

# Calls that a server of the data plane has at a time: its peers have one each, and short ones.
MAX_CALLS = 256
# Most connections have no call, or one; what is more knocks for its own sake.
_CONNECTIONS_PER_CALL = 4
# A connection that is none, and one that asks nothing, take a place from others.
_HANDSHAKE_TIMEOUT_MS = 5_000
_IDLE_MS = 5 * 60_000
# gRPC refuses what exceeds the first more and more often, and the second always.
_METADATA_BYTES = 8 * 1024
_MAX_METADATA_BYTES = 16 * 1024
# Of gRPC's algorithms, as bits: none but identity, so that nothing can be sent that swells here.
_NO_COMPRESSION = 0b1

# Room for the bytes of a frame that do not belong to its items.
_FRAME_SLACK_BYTES = 64 * 1024


def channel_options(max_frame_bytes: int) -> Options:
    """Options of a client channel that may receive frames of max_frame_bytes."""
    return [
        *_common(max_frame_bytes),
        ("grpc.http2.max_pings_without_data", 0),
        # A shared subchannel would apply a dead worker's back-off to its successor on the port.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        *_BOUNDS,
    ]


def public_server_options(max_message_bytes: int, max_calls: int) -> Options:
    """Options of the public service's own server; it reads no longer message.

    max_calls: at a time; a client may make them all over one connection."""
    return [
        *_server(max_calls),
        ("grpc.max_receive_message_length", max_message_bytes),
        # A client that vanished without a word holds its request for no longer than two of them.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # So that clients may notice within seconds that this server is silent.  They may ping every
        # second, and pings that are on their way for a while come closer together than they left.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # Replicas on one node share the port, also while one replaces another.
        ("grpc.so_reuseport", 1),
    ]


def server_options(max_frame_bytes: int) -> Options:
    """Options of a server that may receive frames of max_frame_bytes."""
    return [
        *_server(MAX_CALLS),
        *_common(max_frame_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_TIME_MS // 2),
        # Pings come half as often, and answers between them start the count again.
        ("grpc.http2.max_ping_strikes", 16),
        # Two processes on one port would split its connections at random.
        ("grpc.so_reuseport", 0),
    ]


_BOUNDS = [
    ("grpc.compression_enabled_algorithms_bitset", _NO_COMPRESSION),
    ("grpc.max_metadata_size", _METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
]


def _server(max_calls: int) -> Options:
    return [
        *_BOUNDS,
        ("grpc.max_concurrent_streams", max_calls),
        ("grpc.max_allowed_incoming_connections", _CONNECTIONS_PER_CALL * max_calls),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
    ]


def _common(max_frame_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_frame_bytes + _FRAME_SLACK_BYTES),
        ("grpc.max_send_message_length", max_frame_bytes + _FRAME_SLACK_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
