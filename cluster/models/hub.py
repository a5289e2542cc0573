"""Snapshots of models on the Hugging Face hub, in its own cache."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

from cluster.errors import ConfigError
from cluster.models.sources import HubSource
from cluster.models.weights import PICKLED, SAFETENSORS, missing_weights

_TOKENIZER = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
_HEAD_WEIGHTS = ["*.safetensors", "*.bin", "*.pt"]
# Repositories hold the same weights in other formats too, in folders inside.
_OTHERS = ["*/*"]


def find(source: HubSource) -> Path | None:
    """The snapshot's folder where this machine has one with weights; nothing is fetched."""
    try:
        folder = Path(snapshot_download(source.repo_id, revision=source.revision,
                                        local_files_only=True))  # fmt: skip
    except (OSError, ValueError):
        return None
    is_whole = (folder / "config.json").is_file() and not missing_weights(folder)
    return folder if is_whole else None


def download(source: HubSource, *, only_tokenizer: bool = False) -> Path:
    """The snapshot's folder, fetched as far as it is not there; raises ConfigError."""
    folder = _snapshot(source, _TOKENIZER)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"the model {_shown(source)} has no config.json: not one in transformers' format"
        )
    if only_tokenizer:
        return folder
    # The same commit, though the branch may move on meanwhile.
    commit = HubSource(source.repo_id, folder.name)
    for weights in (SAFETENSORS, PICKLED):
        _snapshot(commit, [weights])
        if not missing_weights(folder):
            return folder
    raise ConfigError(
        f"the model {_shown(source)} holds no weights in transformers' format, or they cannot be "
        f"fetched now; with a network, run: drafthouse fetch {_shown(source)}"
    )


def download_head(source: HubSource) -> Path:
    """The folder of a draft head's snapshot, whose weights have names of their own."""
    folder = _snapshot(source, ["config.json", *_HEAD_WEIGHTS])
    if not any(list(folder.glob(pattern)) for pattern in _HEAD_WEIGHTS):
        raise ConfigError(f"{_shown(source)} holds no weights of a draft head", param="model")
    return folder


def _snapshot(source: HubSource, patterns: list[str]) -> Path:
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
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(
            f"the model {_shown(source)} is no folder here and cannot be fetched from the Hugging "
            f"Face hub: {reason} Name a folder or a model of `drafthouse models`; for a mirror set "
            "HF_ENDPOINT, for a gated model HF_TOKEN"
        ) from error


def _shown(source: HubSource) -> str:
    return source.repo_id if source.revision is None else f"{source.repo_id}@{source.revision}"
