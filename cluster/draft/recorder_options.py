"""Options of the recorder."""

from __future__ import annotations

from typing import Annotated, Literal

from cluster.config.parse import Folder, PositiveInt, Range, Share
from cluster.errors import ConfigError
from cluster.records import frozen


@frozen
class RecorderOptions:
    """Answers with the target's laws, to train drafters on: token ids, which are text. Nothing is
    kept by default; see docs/learning.md."""

    tenants: Literal["none", "unsalted", "all"] = "none"
    """Whose requests are recorded. none = nobody's; unsalted = those without an API key and without
    a `cache_salt`, which are one tenant; all = everybody's, each tenant's apart. What the folder
    has of tenants that this leaves out is deleted."""
    share: Share = 0.1
    """Share of their requests."""
    keep: Literal["memory", "disk"] = "memory"
    """memory = in the target's process, until an operator asks for it by a file named `spill` in
    the folder; disk = in the folder, at once."""
    folder: Folder = ""
    """Where files are written: each tenant's in a folder of its own that only the server's user may
    read. They hold prompts and answers."""
    max_tokens: PositiveInt = 400_000
    """Tokens that are kept of one tenant (prompts, answers and rejected drafts), about 200 bytes
    each; the oldest answers are deleted."""
    max_age_h: Annotated[float, Range(0, is_open=True)] = 72.0
    """Answers are deleted after so many hours."""
    max_tenants: PositiveInt = 8
    """Tenants of which anything is kept; what is kept of the one that has been silent for longest
    is deleted."""

    def __post_init__(self) -> None:
        if self.tenants != "none" and not self.folder:
            raise ConfigError.at("folder", "missing; name the folder where answers are written")
