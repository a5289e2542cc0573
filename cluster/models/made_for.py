"""Which target a drafter was made for: a note in the drafter's folder or options.

A drafter for another target that happens to have the same sizes loads, drafts, and is hardly ever
accepted; nothing but such a note can tell why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.records import frozen

# Of a drafter's config.json: which target it was made for.
_MADE_FOR = "made_for"
# Digits of a hash in a message.
_SHOWN = 12


def served_hash(model_hash: str, weights: str) -> str:
    """The hash of a checkpoint as it is served.  weights: the format of those in few bits, "" = it
    has none; other numbers give other texts."""
    return f"{model_hash}|weights={weights}" if weights else model_hash


def checkpoint_of(model_hash: str) -> str:
    """The checkpoint's own hash, of a `served_hash`."""
    return model_hash.partition("|")[0]


@frozen
class MadeFor:
    """The target that a drafter was made for.

    name: as whoever made it called the target.  model_hash: `fingerprint.model_hash` of it, ""
    where only a name is known, as of published heads.  Both are "" where nothing is known.
    """

    name: str = ""
    model_hash: str = ""

    def fits(self, target: MadeFor) -> bool:
        """True unless `target`, the served one, is known to be another: by its checkpoint's hash,
        or else by the last part of its name, which is the same in a folder and on a hub."""
        if self.model_hash and target.model_hash:
            return checkpoint_of(self.model_hash) == checkpoint_of(target.model_hash)
        mine, theirs = _last_part(self.name), _last_part(target.name)
        return not mine or not theirs or mine == theirs

    def __str__(self) -> str:
        shown = f" (hash {self.model_hash[:_SHOWN]})" if self.model_hash else ""
        return f"{self.name or 'a target without a name'}{shown}"

    def written_into(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A drafter's configuration that says so."""
        return {**config, _MADE_FOR: asdict(self)}


def made_for_of(drafter: object) -> MadeFor:
    """What a drafter says of its own target; nothing is known where it says nothing."""
    found = getattr(drafter, "made_for", None)
    return found if isinstance(found, MadeFor) else MadeFor()


def read_made_for(config: Mapping[str, Any]) -> MadeFor:
    """The target that a drafter's config.json names, in our words or in a published format's."""
    own = config.get(_MADE_FOR)
    if isinstance(own, Mapping):
        return MadeFor(str(own.get("name", "")), str(own.get("model_hash", "")))
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    named = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return MadeFor(str(named or config.get("base_model_name_or_path") or ""))


def folder_made_for(folder: str | Path) -> MadeFor:
    """`read_made_for` of a folder; of one without a readable configuration nothing is known."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return MadeFor()
    return read_made_for(config) if isinstance(config, Mapping) else MadeFor()


def write_made_for(folder: Path, made_for: MadeFor) -> None:
    """Note it in the config.json of a drafter's folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_config(folder, made_for.written_into(config))


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model's config.json, its keys in order."""
    (folder / "config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _last_part(name: str) -> str:
    return name.rstrip("/").split("/")[-1].lower()
