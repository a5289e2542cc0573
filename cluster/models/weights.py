"""Whether a model's folder holds its weights, told by the names of its files."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.errors import ConfigError

# In transformers' order of preference.
SAFETENSORS, PICKLED = "model*.safetensors", "pytorch_model*.bin"
# What git leaves in a file's place where it was told to fetch no large files, or could not.
_LFS_POINTER = b"version https://git-lfs"


def missing_weights(folder: Path) -> tuple[str, ...]:
    """The weights files that `folder` lacks, () if all are there.

    An index lists the files of weights in several parts.  Raises ConfigError for a damaged index.
    """
    for pattern in (SAFETENSORS, PICKLED):
        for index in folder.glob(f"{pattern}.index.json"):
            parts = _parts(index)
            return tuple(sorted(part for part in parts if not (folder / part).is_file()))
        if any(folder.glob(pattern)):
            return ()
    return ("model.safetensors",)


def check_weights(folder: Path) -> None:
    """Raise ConfigError, with the remedy, for a folder whose weights are not all there."""
    missing = missing_weights(folder)
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of its weights files, {missing[0]} among them; copy "
            "or download the whole folder again",
            param="model",
        )
    for pattern in (SAFETENSORS, PICKLED):
        for path in folder.glob(pattern):
            with path.open("rb") as file:
                if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                    raise ConfigError(
                        f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in "
                        "that folder",
                        param="model",
                    )


def _parts(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{index} is damaged ({type(error).__name__}); download the model again",
            param="model",
        ) from error
