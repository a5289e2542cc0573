"""Where servers listen, how hosts and addresses are written, and what clients may have there: the
sections of the doors to clients, with the file of their keys."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from cluster.config.parse import (
    Line,
    Name,
    NonNegativeInt,
    Port,
    PositiveInt,
    Range,
    Readable,
    Seconds,
    matching,
)
from cluster.records import frozen

LOOPBACK = "127.0.0.1"
_LOOPBACK_OF = {"0.0.0.0": LOOPBACK, "::": "::1"}

_BRACKETED = re.compile(r"\[(.*:.*)\]")
# As in RFC 1123, and with the '_' of many a machine's own name.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


def host_of(text: str) -> str:
    """Return a host as sockets take it: an IPv6 address without its brackets.

    Raises ValueError for what is neither an IP address nor a machine's name."""
    bracketed = _BRACKETED.fullmatch(text)
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(bracketed[1] if bracketed else text))
    # What ends in a number is an IPv4 address to whoever looks it up.
    if _NAME.fullmatch(text) and not text.rstrip(".").rpartition(".")[2].isdigit():
        return text
    raise ValueError("write an IP address, such as 127.0.0.1 or ::1, or a machine's name")


def joined(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(text: str) -> str:
    """Return an address of HTTP, or ""; raises ValueError for another text."""
    if not text:
        return text
    parts = urlsplit(text)
    # White space inside is dropped there without a word.
    if parts.scheme not in ("http", "https") or text.split() != [text]:
        raise ValueError("write http://HOST:PORT or https://HOST:PORT, and a path where it has one")
    host_of(parts.hostname or "")
    if parts.port == 0:
        raise ValueError("port 0 is nobody's; name the one that is listened at")
    return text


def is_loopback(host: str) -> bool:
    """True if `host` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(host: str) -> bool:
    """Whether a server at `host` listens on all interfaces."""
    return host in _LOOPBACK_OF


def from_here(host: str) -> str:
    """Where this machine reaches a server that listens at `host`."""
    return _LOOPBACK_OF.get(host, host)


Host = Annotated[str, Readable("host", host_of)]
Url = Annotated[str, Readable("address of HTTP", url_of)]


@frozen
class Listener:
    """Where a server listens."""

    host: Host = LOOPBACK
    """The interface to listen on, IPv4 or IPv6; 0.0.0.0 and :: = all."""
    port: Port | None = None
    """TCP port."""


@frozen
class HttpConfig(Listener):
    """The OpenAI-compatible endpoint: every ingress replica listens on its own node."""

    REMOVED: ClassVar = {
        "listener": "every ingress replica listens itself, at host and port of its node; remove "
        "it, and write host: 0.0.0.0 where other machines are to reach it",
    }

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
class GrpcConfig(Listener):
    """The gRPC endpoint: every ingress replica listens on its own node."""

    REMOVED: ClassVar = HttpConfig.REMOVED
    port: Port = 9000
    """TCP port."""


@frozen
class ApiConfig:
    """The HTTP API, beside the limits in `ingress`."""

    compatibility: Literal["strict", "lenient"] = "lenient"
    """lenient = a field that api.md does not list, and what clients send though it changes nothing
    here, has no effect: the header Warning of the answer names it, and the log does once. strict =
    it is answered 400. Refused fields are refused by both."""
    served_model_names: tuple[Line, ...] = ()
    """Names that clients may use beside model_name; an answer has the one that its request used."""
    cors_origins: tuple[str, ...] = ()
    """Pages from these origins may call the API from a browser (`https://host[:port]`); "*" = from
    any."""
    heartbeat_s: Seconds = 15.0
    """A stream without an event for so long, say of a request that queues, gets a comment, which
    keeps proxies from cutting it. 0 = never."""
    max_request_timeout_s: Seconds = 0.0
    """An answer that is not ready after this time is given up, with 504. A request asks for less
    with the header x-request-timeout-ms. 0 = no limit."""
    max_stored_responses: NonNegativeInt = 1024
    """Answers of /v1/responses that are kept, by each ingress replica, for previous_response_id;
    the oldest go first. 0 = none."""
    max_stored_bytes: NonNegativeInt = 64 * 1024 * 1024
    """Bytes that their messages may take together."""


@frozen
class UiConfig:
    """The page at `/`: conversations, races with and without drafts, and how the parts do."""

    enabled: Literal["auto"] | bool = "auto"
    """auto = where http.host is loopback. false = browsers get a list of the endpoints."""

    def is_served(self, where: HttpConfig) -> bool:
        """True if browsers get the page."""
        return where.is_local if self.enabled == "auto" else self.enabled


@frozen
class DashboardConfig(Listener):
    """Ray's dashboard, where `drafthouse serve` starts Ray itself."""

    port: Port = 8265
    """TCP port."""
    enabled: bool = True
    """false starts no dashboard."""


@frozen
class NetworkConfig:
    """How the parts reach each other: coordinators, targets, drafters, and Ray where `drafthouse
    serve` starts it. Ray asks for a token, and the others for one of their own (`data_plane`)."""

    interface: Literal["loopback", "node"] = "loopback"
    """loopback = 127.0.0.1, for one machine. node = the node's address as Ray knows it, for
    clusters; what goes over the network is in clear without `data_plane.tls`."""


def digest_of(key: str) -> str:
    """Return what the file has of a key.  A key is drawn at random, so its plain hash tells nothing
    of it."""
    return hashlib.sha256(key.encode()).hexdigest()


Digest = Annotated[
    str,
    Readable(
        "SHA-256 digest",
        matching(
            "(?:[0-9a-f]{64})?",
            "write 64 digits of 0-9 and a-f; `drafthouse key NAME` prints a key and its entry",
        ),
        is_secret=True,
    ),
]


@frozen
class AdminConfig(Listener):
    """A port of their own for /metrics and the whole of /health, which asks nobody for a key."""

    port: Port | None = None
    """TCP port; where http.host is not loopback, the public port then has them for admin keys only.
    null = none."""


@frozen
class AccessConfig:
    """Who may use HTTP and gRPC, and who may see how the server does: see access.md."""

    keys_file: str = ""
    """A YAML or JSON file with the keys of the clients, read again whenever it changes. Empty =
    everybody may ask."""
    admin: AdminConfig = AdminConfig()


@frozen
class RateLimits:
    """What a key, or all requests of a class, may have of all ingress processes together. null = no
    limit."""

    requests_per_minute: PositiveInt | None = None
    """Requests."""
    tokens_per_minute: PositiveInt | None = None
    """Tokens of prompts, counted when a request is let in, and of outputs, counted when it ends."""
    concurrent_requests: PositiveInt | None = None
    """Requests at the same time."""


@frozen
class ClientKey(RateLimits):
    """One key, with its limits."""

    sha256: Digest = ""
    """The SHA-256 of the key, in hexadecimal digits. The key itself is nowhere."""
    previous_sha256: Digest = ""
    """That of the key before it, which is valid until this line is removed."""
    classes: tuple[str, ...] | None = None
    """The coordinator.latency_classes that its requests may name. null = those of
    ingress.public_latency_classes."""
    default_class: str = ""
    """The class of its requests that name none."""
    default_task: str = ""
    """The task class of its requests that name none."""
    segment: str = ""
    """The one of ingress.segments that its requests belong to, whatever they say. Empty = they say
    it."""
    admin: bool = False
    """It may see the whole of /metrics and /health; other keys see their own usage on /metrics."""


@frozen
class KeysFile:
    """The file that access.keys_file names."""

    keys: Mapping[Name, ClientKey] = field(default_factory=dict)
    """By name. A key that changes keeps its name, and with it what is kept for its owner."""
    classes: Mapping[str, RateLimits] = field(default_factory=dict)
    """The limits of a latency class, for all keys together."""
