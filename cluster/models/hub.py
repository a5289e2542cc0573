"""Snapshots of models on the Hugging Face hub, in its own cache."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import snapshot_download

from cluster.errors import ConfigError
from cluster.models.sources import HubSource

_TOKENIZER = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
_SAFETENSORS, _PICKLED = "model*.safetensors", "pytorch_model*.bin"
# Repositories also hold the same weights in other formats: what lies in folders is such.
_OTHERS = ["*/*"]


def find(source: HubSource) -> Path | None:
    """The snapshot's folder where this machine has one with weights; nothing is fetched."""
    try:
        folder = Path(snapshot_download(source.repo_id, revision=source.revision,
                                        local_files_only=True))  # fmt: skip
    except (OSError, ValueError):
        return None
    is_whole = (folder / "config.json").is_file() and _has_weights(folder)
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
    for weights in (_SAFETENSORS, _PICKLED):
        _snapshot(commit, [weights])
        if _has_weights(folder):
            return folder
    raise ConfigError(
        f"the model {_shown(source)} holds no weights in transformers' format, or they cannot be "
        f"fetched now; with a network, run: drafthouse fetch {_shown(source)}"
    )


def _has_weights(folder: Path) -> bool:
    """Whether all of the weights are here; an index lists the files of those in parts."""
    for pattern in (_SAFETENSORS, _PICKLED):
        for index in folder.glob(f"{pattern}.index.json"):
            parts = json.loads(index.read_text("utf-8"))["weight_map"].values()
            return all((folder / part).is_file() for part in set(parts))
        if any(folder.glob(pattern)):
            return True
    return False


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
