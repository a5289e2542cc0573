"""The step on which native layers are compared with transformers' own, before any is trusted.

Two sequences, one at the beginning of a text and one that ends at the context limit: what depends
on positions in a way of its own shows there.  Each continues a context that is longer than the
kernel's chunk of keys, lies on pages in no order and ends inside of one, by some tokens of a text
and a tree.  The reference is the model's own code, with the attention that all others are tested
against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cluster.engine.attention.cpu import NativeBackend
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.attention.seam import AttentionBackend, AttentionPlan, AttentionStep
from cluster.engine.cpu.kernels import Kernels
from cluster.engine.memory.kv_cache import KVCache, layer_groups
from cluster.engine.schedule.batch import Batch, IndexArray, Share
from cluster.engine.types import AttentionOptions, LayerSpec
from cluster.spec.tree import ancestor_mask

# Classes of transformers whose layers and positions are those that decoder_layer.cpp computes.
# A class is added with a checkpoint of it in the tests.
_CLASSES = frozenset(
    f"transformers.models.{name}.modeling_{name}.{prefix}ForCausalLM"
    for name, prefix in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
        ("smollm3", "SmolLM3"),
    )
)
_PAGE_SIZE = 16
# In no order, and those of the two sequences mixed; each holds more than the kernel's 64 keys.
_PAGES = ((3, 0, 8, 5, 1), (9, 2, 6, 4, 7))
_CONTEXT_LEN = 70
_NUM_DELTA = 3
_PARENTS = np.array([-1, 0, -1], np.int32)
_NUM_NEW = _NUM_DELTA + len(_PARENTS)
# Small keys: attention is spread over all of them, so that each one counts.
_CACHE_STD = 0.3


def is_comparable(module: torch.nn.Module) -> bool:
    """True if the model is of a class for which native layers are made."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}" in _CLASSES


class NotingStep(AttentionStep):
    """A step that keeps the options that it attended with last."""

    options: AttentionOptions | None = None

    def attend_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self.options = options
        return super().attend_layer(layer, query, key, value, options)


class Comparison:
    """num_rows: of the step.  positions: int64[rows], as the model is told them.  groups: of the
    model's layers."""

    def __init__(self, layers: Sequence[LayerSpec], max_context_len: int, kernels: Kernels) -> None:
        """layers: as probed."""
        cpu = torch.device("cpu")
        self.layers = tuple(replace(each, dtype=torch.float32, device=cpu) for each in layers)
        self.groups = layer_groups(self.layers, _PAGE_SIZE)
        self._backends: tuple[AttentionBackend, ...] = (SdpaBackend(), NativeBackend(kernels))
        # A small limit leaves no room for all of it; one too small to serve is refused later.
        limit = max(max_context_len, _NUM_NEW + 1)
        context_len = min(_CONTEXT_LEN, limit - _NUM_NEW)
        shares = [
            _share(index * _NUM_NEW, pages, context_len) for index, pages in enumerate(_PAGES)
        ]
        first = shares[0].positions
        positions = np.concatenate((first, first + limit - 1 - first.max()))
        start = shares[0].key_len - _NUM_NEW
        self._batch = Batch(
            shares,
            np.arange(len(positions)),
            positions,
            np.concatenate([share.slots[start:] for share in shares]),
            np.arange(len(positions)),
        )
        self.num_rows = len(positions)
        self.positions = torch.from_numpy(positions)

    def layer_steps(self, layer: int) -> list[NotingStep]:
        """Steps of that layer: by the reference attention, and natively, on equal caches."""
        steps: list[NotingStep] = []
        for backend in self._backends:
            cache, specs, plans, slots = self._parts([self.layers[layer]], backend)
            # One layer's memory stands for all, so that it is found under the layer's number.
            count = len(self.layers)
            cache.layers, cache.group_of = cache.layers * count, cache.group_of * count
            steps.append(NotingStep(cache, [*specs] * count, plans, slots))
        return steps

    def steps(self) -> list[AttentionStep]:
        """Steps of the whole model, by the reference attention and natively, on equal caches."""
        return [AttentionStep(*self._parts(self.layers, backend)) for backend in self._backends]

    def _parts(
        self, specs: Sequence[LayerSpec], backend: AttentionBackend
    ) -> tuple[KVCache, Sequence[LayerSpec], list[AttentionPlan], list[torch.Tensor]]:
        num_pages = sum(map(len, _PAGES))
        cache = KVCache(specs, [num_pages] * len(layer_groups(specs, _PAGE_SIZE)), _PAGE_SIZE)
        for index, kv in enumerate(cache.layers):
            generator = torch.Generator().manual_seed(index)
            kv.normal_(0.0, _CACHE_STD, generator=generator)
        # The same slots in every group.
        plans = [backend.plan(self._batch, each) for each in cache.scratch_slots]
        return cache, specs, plans, [torch.from_numpy(self._batch.slots)] * len(plans)


def _share(row_start: int, pages: Sequence[int], context_len: int) -> Share:
    slots: IndexArray = (
        np.array(pages, np.int64)[:, None] * _PAGE_SIZE + np.arange(_PAGE_SIZE)
    ).ravel()
    mask = ancestor_mask(_PARENTS)
    end = context_len + _NUM_DELTA
    node_positions = end + mask.sum(axis=1) - 1
    return Share(
        row_start,
        _NUM_DELTA,
        end,
        slots[: end + len(mask)],
        np.concatenate((np.arange(context_len, end), node_positions)),
        node_positions,
        mask,
    )


def is_close(expected: Any, found: torch.Tensor, tolerance: float | torch.Tensor) -> bool:
    """True if every row of the two, [1, rows, ...], is the same but for rounding.

    tolerance: of a row's norm; one for all, or [1, rows].
    """
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape:
        return False
    error = (found - expected).flatten(1, -2).norm(dim=-1)
    return bool((error <= tolerance * expected.flatten(1, -2).norm(dim=-1)).all())
