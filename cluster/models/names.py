"""The meaning of a `model` key: a folder, a GGUF file, a hub model, or a name we know.

Nothing is fetched or converted here, so it costs no more than a look at the file system.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from cluster.errors import ConfigError
from cluster.models.catalogue import KNOWN, REPOSITORY
from cluster.models.sources import FolderSource, GgufSource, HubSource, Source, WheelSource

# What the hub allows in `owner/name`, and what git allows in a revision without a blank; neither
# allows two dots in a row.
_HUB_MODEL = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def source_of(model: str) -> Source:
    """The folder or GGUF file `model`, below the working directory or the repository, where one is
    there; else a model of the catalogue, else one on the hub.

    Raises ConfigError for anything else.
    """
    if not model:
        raise ConfigError(
            "the model is empty; name a folder, a GGUF file, a hub model, or one of "
            "`drafthouse models`",
            param="model",
        )
    if "\0" in model:
        raise ConfigError(_unknown(model), param="model")
    places = (Path(model).expanduser(), REPOSITORY / model)
    found = _local(places)
    if found is not None:
        return found
    if model in KNOWN:
        return KNOWN[model].source
    for place in places:
        if place.is_dir():
            raise ConfigError(
                f"the model {str(place)!r} has no config.json; name a Hugging Face folder or "
                "a GGUF file",
                param="model",
            )
    hub = _HUB_MODEL.fullmatch(model)
    if hub is None or ".." in model or model.endswith(".gguf") or _is_path(model):
        raise ConfigError(_unknown(model), param="model")
    return HubSource(hub[1], hub[2])


def served_name(model: str) -> str:
    """The name of `model` for clients where the configuration gives it none."""
    try:
        source = source_of(model)
    except ConfigError:
        return model
    match source:
        case FolderSource(path):
            return path.name
        case GgufSource(path):
            return path.stem
        case HubSource(repo_id):
            return repo_id
        case WheelSource():
            return model


def _local(places: Iterable[Path]) -> FolderSource | GgufSource | None:
    for place in places:
        if (place / "config.json").is_file():
            return FolderSource(place.resolve())
        if place.suffix == ".gguf" and place.is_file():
            return GgufSource(place.resolve())
    return None


def _is_path(model: str) -> bool:
    """True for a text written as a path, or whose first part is a folder of this machine."""
    if model.startswith((".", "/", "~")):
        return True
    first = Path(model).parts[0]
    return any((base / first).is_dir() for base in (Path.cwd(), REPOSITORY))


def _seen_from(model: str) -> str:
    """Where a relative path was looked for."""
    if Path(model).expanduser().is_absolute():
        return ""
    places = dict.fromkeys(map(str, (Path.cwd(), REPOSITORY)))
    return f" (seen from {' and '.join(places)})"


def _unknown(model: str) -> str:
    near = difflib.get_close_matches(model.lower(), KNOWN, n=1, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return (
        f"the model {model!r} is no such folder or file{_seen_from(model)}, no hub model of the "
        f"form owner/name, and none of `drafthouse models`{hint}"
    )
