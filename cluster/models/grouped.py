"""Weights in few bits: integers in groups of a row's inputs, each with a scale and a least value.

    weight[o, i] = scale[o, i // group] * q[o, i] + minimum[o, i // group]

GGUF's blocks are of this form: Q4_0 and Q4_1 (32 inputs), Q8_0 (32, no minimum), and, with their
scales multiplied out, Q4_K and Q5_K (32) and Q6_K (16, no minimum).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cluster.errors import ConfigError
from cluster.models.weights import GROUPED, INT8
from cluster.records import record

GROUPS = (32, 16)


@record
class GroupedWeight:
    """A matrix [out, in] of a linear layer.

    bits: 4 (q is 0 to 15) or 8 (q is -128 to 127).  q: uint8 or int8 [out, in].
    scale, minimum: float16 [out, in / group].  Raises ValueError for sizes that do not fit.
    """

    bits: int
    group: int
    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None

    def __post_init__(self) -> None:
        num_outputs, num_inputs = self.q.shape
        if self.bits not in (4, 8) or self.group not in GROUPS or num_inputs % self.group:
            raise ValueError(
                f"no weights of {self.bits} bits in groups of {self.group} for {num_inputs} "
                "inputs: 4 or 8 bits, groups of 16 or 32 that divide the inputs"
            )
        expected = (num_outputs, num_inputs // self.group)
        for each in (self.scale, self.minimum):
            if each is not None and each.shape != expected:
                raise ValueError(f"scales of shape {tuple(each.shape)}, not {expected}")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.q.shape[0], self.q.shape[1]

    def dequantized(self) -> torch.Tensor:
        """The weights that it stands for, float32[out, in]."""
        grouped = (self.q.shape[0], -1, self.group)
        weights = self.q.float().view(grouped) * self.scale.float()[..., None]
        if self.minimum is not None:
            weights = weights + self.minimum.float()[..., None]
        return weights.view(self.q.shape)


def stacked(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """The outputs of several weights with the same inputs as one weight, which stands for the same
    numbers: of the most bits and the smallest group among them, with minimums if any has some."""
    if len(weights) == 1:
        return weights[0]
    bits = max(each.bits for each in weights)
    group = min(each.group for each in weights)
    has_minimum = any(each.minimum is not None for each in weights)
    integers, scales, minimums = [], [], []
    for each in weights:
        finer = each.group // group
        integers.append(each.q.to(torch.uint8 if bits == 4 else torch.int8))
        scales.append(each.scale.repeat_interleave(finer, dim=1))
        least = torch.zeros_like(each.scale) if each.minimum is None else each.minimum
        minimums.append(least.repeat_interleave(finer, dim=1))
    minimum = torch.cat(minimums) if has_minimum else None
    return GroupedWeight(bits, group, torch.cat(integers), torch.cat(scales), minimum)


def in_four_bits(weight: torch.Tensor) -> GroupedWeight | None:
    """The nearest such weight of four bits to float32 or bfloat16 [out, in], in groups of 32 inputs
    or of 16; None where neither divides the inputs."""
    grouped = _in_groups(weight)
    if grouped is None:
        return None
    least, most = grouped.aminmax(dim=2)
    # Rounded before they are used, so that no weight is off by more than half a step of them.
    minimum = least.half()
    scale = ((most - minimum.float()) / 15.0).half()
    q = ((grouped - minimum.float()[..., None]) / _steps(scale)).round().clamp(0, 15)
    return GroupedWeight(4, grouped.shape[2], q.to(torch.uint8).view(weight.shape), scale, minimum)


def in_eight_bits(weight: torch.Tensor) -> GroupedWeight | None:
    """The nearest such weight of eight bits, without minimums; as `in_four_bits`."""
    grouped = _in_groups(weight)
    if grouped is None:
        return None
    scale = (grouped.abs().amax(dim=2) / 127.0).half()
    q = (grouped / _steps(scale)).round().clamp(-127, 127)
    return GroupedWeight(8, grouped.shape[2], q.to(torch.int8).view(weight.shape), scale, None)


def _in_groups(weight: torch.Tensor) -> torch.Tensor | None:
    """float32 [out, groups, inputs of one]; None where no group divides the inputs."""
    group = next((size for size in GROUPS if weight.shape[1] % size == 0), 0)
    return weight.detach().float().reshape(len(weight), -1, group) if group else None


def _steps(scale: torch.Tensor) -> torch.Tensor:
    return scale.float().clamp(min=1e-12)[..., None]


# Weights in groups, kept beside a checkpoint's own file.
#
# NAME.q        int8[out, in], or uint8[out, in / 2]: two of four bits, the first in the lower
# NAME.scale    float16[out, in / group]
# NAME.minimum  likewise, with four bits only
#
# NAME is a linear layer's in the model. Whoever knows nothing of this file reads the checkpoint.


_Q, _SCALE, _MINIMUM = ".q", ".scale", ".minimum"


def save_groups(weights: Mapping[str, GroupedWeight], folder: Path) -> None:
    """Write weights, by their layers' names, into `folder`; nothing where there are none."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        q = weight.q if weight.bits == 8 else weight.q[:, ::2] | weight.q[:, 1::2] << 4
        tensors[name + _Q], tensors[name + _SCALE] = q.contiguous(), weight.scale
        if weight.minimum is not None:
            tensors[name + _MINIMUM] = weight.minimum
    if tensors:
        save_file(tensors, folder / GROUPED)


class StoredGroups(Mapping[str, GroupedWeight]):
    """The weights of such a file, each read when it is asked for; none where there is no file.

    layers: the names of those to be there, None = all."""

    def __init__(self, folder: Path, layers: Collection[str] | None = None) -> None:
        path = folder / GROUPED
        # safetensors has no types for it.
        self._file: Any = None
        if path.is_file():
            self._file = safe_open(path, "pt")
        self._keys: frozenset[str] = frozenset(self._file.keys() if self._file else ())
        found = (key.removesuffix(_Q) for key in sorted(self._keys) if key.endswith(_Q))
        self._names = {name: None for name in found if layers is None or name in layers}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> GroupedWeight:
        if name not in self._names:
            raise KeyError(name)
        q, scale = (self._file.get_tensor(name + part) for part in (_Q, _SCALE))
        is_narrow = q.dtype == torch.uint8
        if is_narrow:
            q = torch.stack([q & 15, q >> 4], dim=2).flatten(1)
        has_minimum = name + _MINIMUM in self._keys
        return GroupedWeight(
            bits=4 if is_narrow else 8,
            group=q.shape[1] // scale.shape[1],
            q=q,
            scale=scale,
            minimum=self._file.get_tensor(name + _MINIMUM) if has_minimum else None,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# Weights in half the space: int8 with one scale a row, beside an ordinary Hugging Face config.
#
# NAME          int8[out, in] for matrices, bfloat16 for all else
# NAME.scale    float32[out], of matrices: the weight is its int8 row times this
#
# They are unpacked while they are loaded.  Our kernels on a CPU take the integers as they are, in
# groups that have their row's scale; others compute with them as with any weights.


def save_int8(state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a state dict into `folder`; each weight changes by half a step of its row at most."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim != 2:
            packed[name] = tensor.to(torch.bfloat16).contiguous()
            continue
        rows = tensor.float()
        scale = (rows.abs().amax(dim=1) / 127.0).clamp(min=1e-12)
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
