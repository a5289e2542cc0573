"""The section of who may use the endpoints, and the file of keys that it names."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Annotated

from cluster.config.addresses import Host
from cluster.config.parse import Pattern, Port, PositiveInt, check_known, name_of
from cluster.errors import ConfigError
from cluster.records import frozen


def digest_of(key: str) -> str:
    """Return what the file has of a key.  A key is drawn at random, so its plain hash tells nothing
    of it."""
    return hashlib.sha256(key.encode()).hexdigest()


Digest = Annotated[
    str,
    Pattern(
        "(?:[0-9a-f]{64})?",
        "it is no SHA-256 digest, which has 64 digits of 0-9 and a-f; `drafthouse key "
        "NAME` prints a key and its entry",
        "(64 hexadecimal digits)",
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

    keys: Mapping[Annotated[str, name_of("a key's")], ClientKey] = field(default_factory=dict)
    """By name. A key that changes keeps its name, and with it what is kept for its owner."""
    classes: Mapping[str, RateLimits] = field(default_factory=dict)
    """The limits of a latency class, for all keys together."""

    def check(
        self,
        classes: Collection[str],
        public: Collection[str],
        tasks: Collection[str],
        segments: Collection[str],
    ) -> None:
        """Raise ConfigError for the first entry that cannot be used.

        classes, public: the latency classes, those that anybody may name.
        """
        if not self.keys:
            raise ConfigError.at(
                "keys",
                "there is none, so that nobody could ask; `drafthouse key NAME` makes one",
            )
        owners: dict[str, str] = {}
        for name, key in self.keys.items():
            path = f"keys.{name}"
            if not key.sha256:
                raise ConfigError.at(
                    f"{path}.sha256", f"missing; `drafthouse key {name}` prints a key and its entry"
                )
            for digest in filter(None, (key.sha256, key.previous_sha256)):
                if owners.setdefault(digest, name) != name:
                    reason = f"that of {owners[digest]} as well; give each a key of its own"
                    raise ConfigError.at(f"{path}.sha256", reason)
            for each in key.classes or ():
                _check_named(each, classes, "class", f"{path}.classes")
            allowed = public if key.classes is None else key.classes
            if key.default_class:
                _check_named(key.default_class, allowed, "class", f"{path}.default_class")
            if key.default_task:
                _check_named(key.default_task, tasks, "task", f"{path}.default_task")
            if key.segment:
                _check_named(key.segment, segments, "segment", f"{path}.segment")
        for name in self.classes:
            _check_named(name, classes, "class", f"classes.{name}")


def _check_named(name: str, known: Collection[str], kind: str, path: str) -> None:
    check_known(name, known, path, f"{name!r} is no {kind} that it may name", "known")
