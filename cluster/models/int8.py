"""Weights in half the space: int8 with one scale a row, beside an ordinary Hugging Face config.

    NAME          int8[out, in] for matrices, bfloat16 for all else
    NAME.scale    float32[out], of matrices: the weight is its int8 row times this

They are unpacked while they are loaded.  Our kernels on a CPU take the integers as they are, in
groups that have their row's scale; others compute with them as with any weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cluster.errors import ConfigError
from cluster.models.grouped import GroupedWeight
from cluster.models.weights import INT8

_SCALE = ".scale"
_LARGEST = 127.0


def save_int8(state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a state dict into `folder`; each weight changes by half a step of its row at most."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim != 2:
            packed[name] = tensor.to(torch.bfloat16).contiguous()
            continue
        rows = tensor.float()
        scale = (rows.abs().amax(dim=1) / _LARGEST).clamp(min=1e-12)
        packed[name] = (rows / scale[:, None]).round().to(torch.int8)
        packed[name + _SCALE] = scale
    save_file(packed, folder / INT8)


def is_int8(folder: Path) -> bool:
    """True if `folder` holds weights of this form."""
    return (folder / INT8).is_file()


def load_int8(folder: Path) -> dict[str, torch.Tensor] | None:
    """The state dict in `folder`, in float32; None where it holds no such file.

    Raises ConfigError for a matrix without a scale for each of its rows.
    """
    path = folder / INT8
    if not is_int8(folder):
        return None
    packed = load_file(path)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in packed.items():
        if name.endswith(_SCALE):
            continue
        if tensor.dtype == torch.int8:
            scale = packed.get(name + _SCALE)
            if scale is None or scale.shape != tensor.shape[:1]:
                raise ConfigError(f"{path}: {name} lacks a scale for each row; copy the file again")
            tensor = tensor.float() * scale[:, None]
        state[name] = tensor.float()
    return state


def int8_groups(folder: Path) -> dict[str, GroupedWeight]:
    """The matrices in `folder` by their layers' names, as far as groups of 32 divide their inputs.

    Their scales are rounded to float16."""
    packed = load_file(folder / INT8)
    found: dict[str, GroupedWeight] = {}
    for name, q in packed.items():
        if q.dtype == torch.int8 and q.shape[1] % 32 == 0:
            scale = packed[name + _SCALE].half()[:, None].expand(-1, q.shape[1] // 32)
            layer = name.removesuffix(".weight")
            found[layer] = GroupedWeight(8, 32, q, scale.contiguous(), None)
    return found
