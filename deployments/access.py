"""Who may use the server: the file of keys is read and checked before it starts, what holds is told
in a line, and keys for its clients are made."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from cluster.config.doors import KeysFile, digest_of, is_loopback
from cluster.config.file import in_file, read_document
from cluster.config.parse import NAME, check_known, check_that, parse
from cluster.config.schema import Config
from cluster.errors import ConfigError

# Says whose it is to those who find one, and to programs that look for secrets.
_PREFIX = "dh-"
_KEY_BYTES = 32


def new_key(name: str) -> str:
    """Return a new key and its entry for the file of keys, as text; raises ConfigError for a name
    that a key cannot have."""
    with ConfigError.below("NAME"):
        NAME(name)
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return (
        f"# The key of {name}. It is shown this once:\n"
        f"#   {key}\n"
        "# Its entry in the file that access.keys_file names:\n"
        f"keys:\n  {name}:\n    sha256: {digest_of(key)}\n"
    )


def read_keys(config: Config) -> KeysFile:
    """Read and check what `access.keys_file` names.

    Raises ConfigError with the file, the entry and the remedy; no message repeats what may be a
    key.
    """
    path = Path(config.access.keys_file)
    with in_file(path):
        document = read_document(path, "docs/access.md")
        keys = document.get("keys") or {}
        check_that(
            isinstance(keys, Mapping),
            "keys",
            "not a mapping; write `NAME: {sha256: DIGEST}` below it",
        )
        for name, entry in keys.items():
            check_that(
                isinstance(entry, Mapping),
                f"keys.{name}",
                "not a mapping; write `sha256: DIGEST` below it",
            )
        file = parse(KeysFile, document)
        _check_file(file, config)
    return file


def _check_file(file: KeysFile, config: Config) -> None:
    """Raise ConfigError for the first entry that cannot be used."""
    check_that(
        file.keys,
        "keys",
        "there is none, so that nobody could ask; `drafthouse key NAME` makes one",
    )

    def check(place: str, name: str, kind: str, known: Collection[str]) -> None:
        if name:
            reason = f"{name!r} is no {kind} that it may name"
            check_known(name, known, place, reason, "known")

    classes, tasks = config.coordinator.latency_classes, (*config.tasks, "default")
    for each in file.classes:
        check(f"classes.{each}", each, "class", classes)
    owners: dict[str, str] = {}
    for name, key in file.keys.items():
        path = f"keys.{name}"
        check_that(
            key.sha256,
            f"{path}.sha256",
            f"missing; `drafthouse key {name}` prints a key and its entry",
        )
        for digest in filter(None, (key.sha256, key.previous_sha256)):
            check_that(
                owners.setdefault(digest, name) == name,
                f"{path}.sha256",
                f"that of {owners[digest]} as well; give each a key of its own",
            )
        allowed = config.public_latency_classes if key.classes is None else key.classes
        for each in key.classes or ():
            check(f"{path}.classes", each, "class", classes)
        check(f"{path}.default_class", key.default_class, "class", allowed)
        check(f"{path}.default_task", key.default_task, "task", tasks)
        check(f"{path}.segment", key.segment, "segment", config.ingress.segments)


def check_access(config: Config) -> None:
    """Raise ConfigError for a file of keys that cannot be used."""
    try:
        if config.access.keys_file:
            read_keys(config)
    except ConfigError as error:
        raise ConfigError.at("access.keys_file", error.message) from error


def access_lines(config: Config) -> Iterator[str]:
    """Yield what an operator should know of who may use the server."""
    path = config.access.keys_file
    if path:
        found = f"{len(read_keys(config).keys)} keys" if Path(path).is_file() else "not here to see"
        yield f"clients need a key of {path} ({found})"
        return
    told = [
        f"{face}.host {host}"
        for face, host in (("http", config.http.host), ("grpc", config.grpc.host))
        if not is_loopback(host)
    ]
    if told:
        yield (
            f"{' and '.join(told)}: whoever reaches it may ask, and see /metrics and /health; "
            "access.keys_file asks clients for keys"
        )
