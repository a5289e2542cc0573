"""The configuration of a model that is not on this machine: enough to say what it takes.

From a folder that holds a config.json alone, from the hub's cache, where a tokenizer was fetched,
or from a table of what makers have published.
"""

from __future__ import annotations

from pathlib import Path

from cluster.errors import ConfigError
from cluster.models.names import source_of
from cluster.models.resolve import find
from cluster.models.sources import FolderSource, HubSource

# Of hub models by owner--name, of the catalogue's by name; the fields that sizes follow from.
_PUBLISHED = Path(__file__).resolve().parent / "published_configs"
# The files of a description: a folder with these alone holds no model.
_WITH_IT = frozenset({"config.json", "generation_config.json"})


def published(model: str) -> Path | None:
    """A folder with the config.json of a model that is not here, None where it is not known."""
    try:
        source = source_of(model)
    except ConfigError:
        return None
    if isinstance(source, FolderSource):
        return source.path if has_config_alone(source.path) else None
    if find(source) is not None:
        return None
    if isinstance(source, HubSource):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(source.repo_id, "config.json", revision=source.revision)
        if isinstance(cached, str):
            return Path(cached).parent
        model = source.repo_id.replace("/", "--")
    folder = _PUBLISHED / model
    return folder if (folder / "config.json").is_file() else None


def has_config_alone(folder: Path) -> bool:
    """True if a folder describes a model and holds neither its weights nor its tokenizer."""
    return {path.name for path in folder.iterdir()} <= _WITH_IT
