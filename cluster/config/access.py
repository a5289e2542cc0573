"""The section of who may use the endpoints, and the file of keys that it names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from cluster.config.addresses import Host
from cluster.config.parse import Name, Port, PositiveInt, Readable, matching
from cluster.records import frozen


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
class AdminConfig:
    """A port of their own for /metrics and the whole of /health, which asks nobody for a key."""

    host: Host = "127.0.0.1"
    """The interface to listen on, IPv4 or IPv6; 0.0.0.0 and :: = all."""
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
