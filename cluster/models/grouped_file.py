"""Weights in groups, kept beside a checkpoint's own file.

    NAME.q          int8[out, in], or uint8[out, in / 2]: two of four bits, the first in the lower
    NAME.scale      float16[out, in / group]
    NAME.minimum    likewise, with four bits only

NAME is a linear layer's in the model.  Whoever knows nothing of this file reads the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cluster.models.grouped import GroupedWeight
from cluster.models.weights import GROUPED

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

    left_out: names of layers whose weights are as if they were not there."""

    def __init__(self, folder: Path, left_out: Collection[str] = ()) -> None:
        self._file = _opened(folder / GROUPED)
        self._keys: frozenset[str] = frozenset(self._file.keys() if self._file else ())
        found = (key.removesuffix(_Q) for key in sorted(self._keys) if key.endswith(_Q))
        self._names = {name: None for name in found if name not in left_out}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> GroupedWeight:
        if self._file is None or name not in self._names:
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


def _opened(path: Path) -> Any:
    """The file, for which safetensors has no types; None where there is none."""
    return safe_open(path, "pt") if path.is_file() else None
