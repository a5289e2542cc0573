"""Who may use the server: what a configuration says of it is checked before it starts and told in a
line, and keys for its clients are made."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

from cluster.config.access import digest_of
from cluster.config.addresses import is_loopback
from cluster.config.keys import read_keys
from cluster.config.parse import name_of
from cluster.config.schema import Config
from cluster.errors import ConfigError

# Says whose it is to those who find one, and to programs that look for secrets.
_PREFIX = "dh-"
_KEY_BYTES = 32


def new_key(name: str) -> str:
    """Return a new key and its entry for the file of keys, as text; raises ConfigError for a name
    that a key cannot have."""
    name_of("a key's").check(name, "NAME")
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return (
        f"# The key of {name}. It is shown this once:\n"
        f"#   {key}\n"
        "# Its entry in the file that access.keys_file names:\n"
        f"keys:\n  {name}:\n    sha256: {digest_of(key)}\n"
    )


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
    faces = {"http": config.http.host, "grpc": config.grpc.host}
    faces = {face: host for face, host in faces.items() if not is_loopback(host)}
    if faces:
        where = " and ".join(f"{face}.host {host}" for face, host in faces.items())
        yield (
            f"{where}: whoever reaches it may ask, and see /metrics and /health; access.keys_file "
            "asks clients for keys"
        )
