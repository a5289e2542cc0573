"""The configuration of the endpoints, of the page for browsers, and of Ray's dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from cluster.config.addresses import Host, is_loopback
from cluster.config.parse import Port, PositiveInt, Range
from cluster.records import frozen


@frozen
class HttpConfig:
    """The OpenAI-compatible endpoint: every ingress replica listens on its own node."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "listener": "every ingress replica listens itself, at host and port of its node; remove "
        "it, and write host: 0.0.0.0 where other machines are to reach it",
    }

    host: Host = "127.0.0.1"
    """The interface to listen on, IPv4 or IPv6; 0.0.0.0 and :: = all."""
    port: Port = 8000
    """TCP port."""
    host_names: tuple[Host, ...] = ()
    """Names by which requests may call a server that listens on loopback, beside loopback's own;
    for a proxy in front that passes on the name that it was asked for. Other names are answered
    403: a page elsewhere can have a name that leads here."""
    max_header_bytes: Annotated[int, Range(1024, 1024 * 1024)] = 32 * 1024
    """A request whose path and headers have more bytes is answered 431. Gateways add some hundred
    bytes, browsers send up to 16 KiB of cookies."""
    max_headers: Annotated[int, Range(8, 4096)] = 128
    """And so is a request with more headers."""
    head_timeout_s: Annotated[float, Range(0.1, 3600)] = 10.0
    """A request whose path and headers have not arrived this long after its first byte is answered
    408. A new connection that sends nothing for so long is closed."""
    keep_alive_s: Annotated[int, Range(1, 3600)] = 90
    """A connection without a request for so long is closed. Longer than load balancers in front
    keep theirs, which would else send a request into a connection that closes."""
    unread_timeout_s: Annotated[int, Range(1, 86400)] = 600
    """A client that takes nothing of its answer for so long is cut off (Linux)."""
    max_connections: PositiveInt = 4096
    """Of one ingress replica. One more takes the place of that which has waited longest without a
    request; where all have one, it is answered 503. Each needs a file: keep it below the
    processes' limit (`ulimit -n`)."""

    @property
    def is_local(self) -> bool:
        """True if only this machine reaches it."""
        return is_loopback(self.host)


@frozen
class GrpcConfig:
    """The gRPC endpoint: every ingress replica listens on its own node."""

    REMOVED: ClassVar[Mapping[str, str]] = HttpConfig.REMOVED
    host: Host = "127.0.0.1"
    """The interface to listen on, IPv4 or IPv6; 0.0.0.0 and :: = all."""
    port: Port = 9000
    """TCP port."""


@frozen
class UiConfig:
    """The page at `/`: conversations, races with and without drafts, and how the parts do."""

    enabled: Literal["auto"] | bool = "auto"
    """auto = where http.host is loopback. false = browsers get a list of the endpoints."""

    def is_served(self, where: HttpConfig) -> bool:
        """True if browsers get the page."""
        return where.is_local if self.enabled == "auto" else self.enabled


@frozen
class DashboardConfig:
    """Ray's dashboard, where `drafthouse serve` starts Ray itself."""

    host: Host = "127.0.0.1"
    """The interface to listen on."""
    port: Port = 8265
    """TCP port."""
    enabled: bool = True
    """false starts no dashboard."""
