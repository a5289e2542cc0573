"""The address of the service, and the ways to reach it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of the service and the way to reach it.

    address: "host:port".  tls: encrypt, and check the server by root_certificates or the system's.
    private_key, certificate_chain: show this client certificate to the server; both or neither.
    server_name: the name in the server's certificate, where it is not the host of the address.
    Keys and certificates are PEM.  metadata: sent with every call, e.g. an authorization header.
    ping_s: time without a byte from the server after which this client asks for a sign of life,
    while a call is open; ping_timeout_s: how long it waits for one before it takes the connection
    for broken.  Our own listeners permit a ping every second; most proxies one in five minutes, and
    they close the connection of a client that sends more.  Raises ValueError for parts that do not
    go together.
    """

    address: str
    tls: bool = False
    root_certificates: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    certificate_chain: bytes | None = None
    server_name: str | None = None
    metadata: Sequence[tuple[str, str]] = field(default=(), repr=False)  # may hold secrets
    ping_s: float = 300.0
    ping_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if (self.private_key is None) != (self.certificate_chain is None):
            raise ValueError(
                "a client certificate needs private_key and certificate_chain; give both or none"
            )
        if self.tls:
            return
        for name in ("root_certificates", "private_key", "server_name"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is given but tls is off; set tls=True")

    def channel(self, kind: Any) -> Any:
        """A new channel of `grpc` or of `grpc.aio`, which are its `kind`."""
        if not self.tls:
            return kind.insecure_channel(self.address, self.options())
        credentials = grpc.ssl_channel_credentials(
            self.root_certificates, self.private_key, self.certificate_chain
        )
        return kind.secure_channel(self.address, credentials, self.options())

    def options(self) -> list[tuple[str, int | str]]:
        """gRPC's options of the channel."""
        name = self.server_name
        return [
            ("grpc.keepalive_time_ms", round(1e3 * self.ping_s)),
            ("grpc.keepalive_timeout_ms", round(1e3 * self.ping_timeout_s)),
            ("grpc.http2.max_pings_without_data", 0),  # 0 = any number: calls wait in queues
            ("grpc.max_receive_message_length", 16 * 1024 * 1024),
            ("grpc.compression_enabled_algorithms_bitset", 0b1),  # none
            # Find a restarted server again quickly.
            ("grpc.initial_reconnect_backoff_ms", 100),
            # Also the time that a connection may take to be made: a kernel accepts for a server
            # that has stopped.
            ("grpc.min_reconnect_backoff_ms", round(1e3 * self.ping_timeout_s)),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            # This client retries, because gRPC cannot resume a stream.
            ("grpc.enable_retries", 0),
            *([] if name is None else [("grpc.ssl_target_name_override", name)]),
        ]
