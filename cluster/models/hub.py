"""Snapshots of models on the Hugging Face hub, in its own cache.

Nothing that could run is fetched, by a list of what is: no Python, and no pickled weights.
The hub's library is imported for hub models alone: most processes have none.
"""

from __future__ import annotations

import logging
from pathlib import Path

from cluster.errors import ConfigError
from cluster.models.names import HubSource
from cluster.models.weights import SAFETENSORS, missing_weights

log = logging.getLogger(__name__)

_TOKENIZER = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_HEAD_WEIGHTS = "*.safetensors"
# Repositories hold the same weights in other formats too, in folders inside.
_OTHERS = ["*/*"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def find(source: HubSource) -> Path | None:
    """The snapshot's folder where this machine has one with weights; nothing is fetched."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(source.repo_id, revision=source.revision, local_files_only=True)
        )
    except (OSError, ValueError):
        return None
    return folder if (folder / "config.json").is_file() and _has_weights(folder) else None


def download(source: HubSource, *, only_tokenizer: bool = False) -> Path:
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


def download_head(source: HubSource) -> Path:
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
