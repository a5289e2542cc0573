"""A trained drafter's note of its target, and a head's folder with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cluster.models.fingerprint import model_hash
from cluster.models.made_for import MadeFor, write_config
from cluster.models.names import served_name
from cluster.models.resolve import resolve


def target_of(model: str) -> MadeFor:
    """The target of a training, by its name or folder."""
    return MadeFor(served_name(model), model_hash(resolve(model)))


def save_head(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], made_for: MadeFor
) -> None:
    """Write a head's folder: model.safetensors, whose weights are rounded to bfloat16, and
    config.json with the target that it was made for."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(rounded, folder / "model.safetensors")
    write_config(folder, made_for.written_into({**config, "torch_dtype": "bfloat16"}))
