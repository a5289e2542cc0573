"""Reads the file of the clients' keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cluster.config.access import KeysFile
from cluster.config.file import in_file, read_document
from cluster.config.parse import mapping, parse
from cluster.config.schema import Config
from cluster.errors import ConfigError


def read_keys(config: Config) -> KeysFile:
    """Read and check what `access.keys_file` names.

    Raises ConfigError with the file, the entry and the remedy; no message repeats what may be a
    key.
    """
    path = Path(config.access.keys_file)
    with in_file(path):
        document = read_document(path, "docs/access.md")
        for name, entry in mapping(document.get("keys"), "keys").items():
            if not isinstance(entry, Mapping):
                raise ConfigError.at(
                    f"keys.{name}", "not a mapping; write `sha256: DIGEST` below it"
                )
        keys = parse(KeysFile, document)
        keys.check(
            config.coordinator.latency_classes,
            config.public_latency_classes,
            (*config.tasks, "default"),
            config.ingress.segments,
        )
    return keys
