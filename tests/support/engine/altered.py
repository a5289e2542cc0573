"""Checkpoints that differ from others in their configuration or in some weights."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cluster.models.grouped import save_int8


def altered(
    checkpoint: Path,
    folder: Path,
    described: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, torch.Tensor]], object] | None = None,
) -> Path:
    """A copy of the checkpoint in `folder`.

    described: what its configuration says besides.  change: of its weights, by their names."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text("utf-8")) | dict(described or {})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if change is not None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def in_int8(checkpoint: Path, folder: Path) -> Path:
    """A copy of the checkpoint in `folder`, with its weights in int8."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_int8(load_file(checkpoint / "model.safetensors"), folder)
    return folder
