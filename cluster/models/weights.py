"""Checks that a model's folder holds its weights whole, by names, lengths and headers of files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError

# Weights in our own form (`cluster.models.grouped`).
INT8 = "model.int8.safetensors"
# What of the weights is also there in fewer bits (`cluster.models.grouped`).
GROUPED = "grouped.safetensors"
# In transformers' order of preference.
SAFETENSORS, PICKLED = "model*.safetensors", "pytorch_model*.bin"
# What git leaves in a file's place where it was told to fetch no large files, or could not.
_LFS_POINTER = b"version https://git-lfs"
# A safetensors file begins with its header's length; the library reads no longer header.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
# PyTorch's files from before 1.6 are a row of pickles, whose length nothing tells.
_ZIPPED = b"PK"


def missing_weights(folder: Path) -> tuple[str, ...]:
    """The weights files that `folder` lacks, () if all are there.

    An index lists the files of weights in several parts.  Raises ConfigError for a damaged index.
    """
    return tuple(path.name for path in weights_files(folder) if not path.is_file())


def stored_bytes(folder: Path) -> int:
    """The bytes of the weights files that `folder` has."""
    return sum(path.stat().st_size for path in weights_files(folder) if path.is_file())


def check_weights(folder: Path) -> None:
    """Raise ConfigError, with the remedy, for a folder whose weights are not all there."""
    missing = missing_weights(folder)
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of its weights files, {missing[0]} among them; copy "
            "or download the whole folder again",
            param="model",
        )
    for path in (*weights_files(folder), *folder.glob(GROUPED)):
        _check_whole(path)


def check_finite(folder: Path) -> None:
    """Raise ConfigError, which names the tensor, for weights in safetensors that are not numbers:
    what a training that went wrong has left."""
    # Only for those who load a model, who have imported both.
    import torch
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        header_of(path)  # raises for what is cut
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                    raise ConfigError(
                        f"{path}: {name} holds NaN or infinite values; copy the folder again, or "
                        "train it again"
                    )


def header_of(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name, as its header describes them; raises ConfigError
    unless the file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise _damaged(path, "its header is cut, or it is no safetensors file")
        data = file.read(length)
    try:
        header = json.loads(data)
        header.pop("__metadata__", None)
        end = max((int(each["data_offsets"][1]) for each in header.values()), default=0)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise _damaged(path, "its header cannot be read") from error
    wanted = _LENGTH_BYTES + length + end
    if size != wanted:
        raise _damaged(path, f"it has {size:,} bytes, by its header {wanted:,}")
    return dict(header)


def safetensors_of(folder: Path) -> list[Path]:
    """The files of weights that are stored under their own names and shapes."""
    return [
        path
        for path in weights_files(folder)
        if path.suffix == ".safetensors" and path.name != INT8
    ]


def weights_files(folder: Path) -> list[Path]:
    """The files that are loaded, there or not, in the order of their names."""
    for pattern in (SAFETENSORS, PICKLED):
        for index in folder.glob(f"{pattern}.index.json"):
            return sorted(folder / part for part in _parts(index))
        found = sorted(folder.glob(pattern))
        if found:
            return found
    return [folder / "model.safetensors"]


def _check_whole(path: Path) -> None:
    with path.open("rb") as file:
        first = file.read(len(_LFS_POINTER))
    if first == _LFS_POINTER:
        raise ConfigError(
            f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in that folder",
            param="model",
        )
    if path.suffix == ".safetensors":
        header_of(path)
    elif not first or (first.startswith(_ZIPPED) and not zipfile.is_zipfile(path)):
        raise _damaged(path, "it ends before its last tensor")


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is damaged ({reason}); copy or download it again", param="model")


def _parts(index: Path) -> set[str]:
    try:
        parts = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(index, type(error).__name__) from error
    if not parts or not all(isinstance(part, str) for part in parts):
        raise _damaged(index, "its weight_map does not name files")
    return parts
