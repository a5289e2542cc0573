"""A configuration's `model` to the folder that holds it."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from cluster.errors import ConfigError
from cluster.models import cache, wheel
from cluster.models.names import FolderSource, GgufSource, HubSource, Source, WheelSource, source_of
from cluster.models.weights import SAFETENSORS, missing_weights

log = logging.getLogger(__name__)

# Part of every converted model's place: a change of what conversion writes makes it anew.
CONVERSION = 4


def find(source: Source) -> Path | None:
    """The folder where this machine has the whole model already; nothing is fetched or made."""
    match source:
        case FolderSource(path):
            return path
        case HubSource():
            return _find_snapshot(source)
        case GgufSource() | WheelSource():
            folder = _converted(source)
            return folder if folder.is_dir() else None


def check_convertible(source: Source) -> None:
    """Raise ConfigError for a GGUF file here that cannot be converted, told by its header."""
    if isinstance(source, GgufSource):
        # Its library takes a moment to import: only for those who convert.
        from cluster.models.gguf import open_gguf

        open_gguf(source.path)


def fetch(source: Source) -> Path:
    """The model's folder, fetched and converted as far as it is not there yet.

    Progress goes to stderr where that is a terminal.  Raises ConfigError with the remedy.
    """
    match source:
        case FolderSource(path):
            return path
        case HubSource():
            return _download_snapshot(source)
        case GgufSource() | WheelSource():
            return cache.fill(_converted(source), functools.partial(_convert, source))


def resolve(model: str, *, only_tokenizer: bool = False) -> Path:
    """The folder of `model`, for whoever is about to load it.

    A GGUF file is converted and a hub model fetched on first use; a catalogue's model is not
    fetched behind the caller's back.  only_tokenizer: of a hub model, leave the weights where they
    are.  Raises ConfigError with the remedy.
    """
    source = source_of(model)
    if isinstance(source, HubSource):
        return _download_snapshot(source, only_tokenizer=only_tokenizer)
    if isinstance(source, WheelSource):
        folder = find(source)
        if folder is None:
            raise ConfigError(
                f"the model {model!r} is not on this machine ({cache.cache_folder()}); get it "
                f"with: drafthouse fetch {model}",
                param="model",
            )
        return folder
    return fetch(source)


def resolve_head(model: str) -> Path:
    """The folder of a draft head: a folder here, or a snapshot of `owner/name@revision`."""
    source = source_of(model)
    match source:
        case FolderSource(path):
            return path
        case HubSource():
            return _download_head(source)
    raise ConfigError(
        f"{model!r} is no draft head; name its folder, or owner/name@revision on the Hugging Face "
        "hub",
        param="model",
    )


def absolute(model: str) -> str:
    """`model` as a text that means the same in any working directory."""
    try:
        source = source_of(model)
    except ConfigError:
        return model
    return str(source.path) if isinstance(source, FolderSource | GgufSource) else model


def _converted(source: GgufSource | WheelSource) -> Path:
    if isinstance(source, GgufSource):
        digest = _digest(source.path, source.path.stat().st_mtime_ns)
        return cache.place(source.path.stem, digest, CONVERSION)
    return cache.place(Path(source.member).stem, source.sha256, CONVERSION)


@functools.cache
def _digest(path: Path, mtime_ns: int) -> str:
    """The SHA-256 of a file as it was changed last: of 20 GB it takes up to a minute."""
    return cache.sha256_of(path)


def _convert(source: GgufSource | WheelSource, scratch: Path) -> Path:
    file = source.path if isinstance(source, GgufSource) else wheel.download(source, scratch)
    # torch takes seconds to import: only for those who convert.
    from cluster.models.gguf import convert

    folder = scratch / "model"
    convert(file, folder)
    return folder


# Snapshots of models on the Hugging Face hub, in its own cache.
#
# Nothing that could run is fetched, by a list of what is: no Python, and no pickled weights.
# The hub's library is imported for hub models alone: most processes have none.

_TOKENIZER = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_HEAD_WEIGHTS = "*.safetensors"
# Repositories hold the same weights in other formats too, in folders inside.
_OTHERS = ["*/*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def _find_snapshot(source: HubSource) -> Path | None:
    """The snapshot's folder where this machine has one with weights; nothing is fetched."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(source.repo_id, revision=source.revision, local_files_only=True)
        )
    except (OSError, ValueError):
        return None
    return folder if (folder / "config.json").is_file() and _has_weights(folder) else None


def _download_snapshot(source: HubSource, *, only_tokenizer: bool = False) -> Path:
    """The snapshot's folder, fetched as far as it is not there; raises ConfigError."""
    folder = _snapshot(source, _TOKENIZER)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the model {source} has no config.json: not one in transformers' format")
    if only_tokenizer:
        return folder
    # The same commit, though the branch may move on meanwhile.
    commit = HubSource(source.repo_id, folder.name)
    _snapshot(commit, [SAFETENSORS])
    if not _has_weights(folder):
        _refuse_pickles(commit)
        raise ConfigError(
            f"the model {source} holds no weights in transformers' format, or they cannot "
            f"be fetched now; with a network, run: drafthouse fetch {source}"
        )
    return folder


def _download_head(source: HubSource) -> Path:
    """The folder of a draft head's snapshot, whose weights have names of their own."""
    folder = _snapshot(source, ["config.json", _HEAD_WEIGHTS])
    commit = HubSource(source.repo_id, folder.name)
    if not any(folder.glob(_HEAD_WEIGHTS)):
        _refuse_pickles(commit)
        raise ConfigError(f"{source} holds no weights of a draft head", param="model")
    if not source.is_pinned:
        log.warning("%s names no commit; to pin this one: %s", source, commit)
    return folder


def _has_weights(folder: Path) -> bool:
    return any(folder.glob(SAFETENSORS)) and not missing_weights(folder)


def _refuse_pickles(commit: HubSource) -> None:
    """Raise ConfigError with the remedy where pickled weights are all that there is."""
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(commit.repo_id, revision=commit.revision)
    except (OSError, ValueError):
        return  # it cannot be asked now
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        raise ConfigError(
            f"the model {commit.repo_id} has its weights as a pickle alone ({pickles[0]}), which "
            "can run code when it is read, and is not fetched; name a repository with safetensors "
            f"(often a branch or a copy), or fetch it yourself (hf download {commit.repo_id} "
            "--local-dir FOLDER) and name that folder: of it plain tensors are read, and nothing "
            "else is unpickled",
            param="model",
        )


def _snapshot(source: HubSource, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source.repo_id,
                revision=source.revision,
                allow_patterns=patterns,
                ignore_patterns=_OTHERS,
            )
        )
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(
            f"the model {source} is no folder here and cannot be fetched from the Hugging "
            f"Face hub: {reason} Name a folder or a model of `drafthouse models`; for a mirror set "
            "HF_ENDPOINT, for a gated model HF_TOKEN"
        ) from error


# The configuration of a model that is not on this machine: enough to say what it takes.
#
# From a folder that holds a config.json alone, from the hub's cache, where a tokenizer was
# fetched, or from a table of what makers have published.


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
        names = {path.name for path in source.path.iterdir()}
        return source.path if names <= _WITH_IT else None
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
