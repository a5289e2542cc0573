"""The step on which layers of ours are compared with transformers' own, before any is trusted.

Two sequences, one at the beginning of a text and one that ends at the context limit: what depends
on positions in a way of its own shows there.  Each continues a context that is longer than the
kernel's chunk of keys, lies on pages in no order and ends inside of one, by some tokens of a text
and a tree.  The reference is the model's own code, with the attention that all others are tested
against.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cluster.core import TokenTree, token_array
from cluster.engine.attention.seam import AttentionBackend, AttentionStep
from cluster.engine.memory import sequence as sequences
from cluster.engine.memory.kv_cache import KVCache, layer_groups
from cluster.engine.schedule.batch import Pick, build_batch
from cluster.engine.types import LayerSpec
from cluster.engine.work import Work
from cluster.records import record

_PAGE_SIZE = 16
# In no order, and those of the two sequences mixed; each holds more than the kernel's 64 keys.
_PAGES = ((3, 0, 8, 5, 1), (9, 2, 6, 4, 7))
_CONTEXT_LEN = 70
_NUM_DELTA = 3
_TREE = TokenTree.of([0, 0, 0], [-1, 0, -1])
_NUM_NEW = _NUM_DELTA + len(_TREE)
# Small keys: attention is spread over all of them, so that each one counts.
_CACHE_STD = 0.3


@record
class LayerCase:
    """What a layer itself says to the step, and an equal step that another way is to be taken in.

    hidden: [1, rows, size], of all sizes.  arguments: of the layer's forward.  expected: its answer
    to them, by `reference`."""

    hidden: torch.Tensor
    arguments: dict[str, Any]
    expected: torch.Tensor
    reference: AttentionStep
    step: AttentionStep

    def is_same(self, found: torch.Tensor, layer: int, tolerance: float) -> bool:
        """True if the other way gave the same output and the same keys and values, but for
        rounding."""
        wanted, written = (each.kv(layer).unsqueeze(0) for each in (self.reference, self.step))
        return is_close(self.expected, found, tolerance) and is_close(wanted, written, tolerance)


class Comparison:
    """num_rows: of the step.  positions: int64[rows], as the model is told them.  groups: of the
    model's layers."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        max_context_len: int,
        backends: tuple[AttentionBackend, AttentionBackend],
    ) -> None:
        """layers: as probed, of the format and on the device of the comparison.  backends: of the
        original, and of what is compared with it."""
        self.layers = tuple(layers)
        self.groups = layer_groups(self.layers, _PAGE_SIZE)
        self._device = self.layers[0].device
        self._backends = backends
        # A small limit leaves no room for all of it; one too small to serve is refused later.
        limit = max(max_context_len, _NUM_NEW + 1)
        context_len = min(_CONTEXT_LEN, limit - _NUM_NEW)
        picks = [_pick(pages, context_len) for pages in _PAGES]
        self._batch = build_batch(picks, min_rows=0, scratch_slot=0, max_context_len=limit)
        first = self._batch.shares[0].positions
        positions = np.concatenate((first, first + limit - 1 - first.max()))
        self.num_rows = len(positions)
        self.positions = torch.from_numpy(positions).to(self._device)

    def of_layer(self, layer: Any, index: int, size: int, rotary: Any) -> LayerCase | None:
        """None for a layer that takes something else than others do.  index: its number.  size: of
        its rows.  rotary: the model's cosines and sines."""
        count, first = self.num_rows, self.layers[0]
        hidden = torch.linspace(-1, 1, count * size).mul(97.0).sin().view(1, count, size)
        # Rows of all sizes, and the same sizes at both ends of the text.
        hidden *= torch.tensor([1e-3, 1.0, 30.0, 0.1, 5.0, 1.0]).repeat(count // 6).view(1, -1, 1)
        hidden = hidden.to(first.device, first.dtype)
        position_ids = self.positions.unsqueeze(0)
        arguments: dict[str, Any] = {
            "attention_mask": None,
            "position_ids": position_ids,
            "past_key_values": None,
            "use_cache": False,
            "position_embeddings": rotary(hidden, position_ids=position_ids),
        }
        reference, step = self._steps
        try:
            expected = layer(hidden, plan=reference, **arguments)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None
        return LayerCase(hidden, arguments, expected, reference, step)

    @cached_property
    def _steps(self) -> list[AttentionStep]:
        """Those in which layers are compared, each on memory of its own."""
        return self.steps()

    def steps(self) -> list[AttentionStep]:
        """Steps of the model by each of the backends, on equal caches."""
        return [self._step(backend) for backend in self._backends]

    def _step(self, backend: AttentionBackend) -> AttentionStep:
        num_pages = [sum(map(len, _PAGES))] * len(self.groups)
        cache = KVCache(self.layers, num_pages, _PAGE_SIZE)
        for index, kv in enumerate(cache.layers):
            generator = torch.Generator(kv.device).manual_seed(index)
            kv.normal_(0.0, _CACHE_STD, generator=generator)
        # The same slots in every group.
        plans = [backend.plan(self._batch, each) for each in cache.scratch_slots]
        slots = torch.from_numpy(self._batch.slots).to(self._device)
        return AttentionStep(cache, self.layers, plans, [slots] * len(plans))


def _pick(pages: Sequence[int], context_len: int) -> Pick:
    sequence = sequences.Sequence("", 0, _PAGE_SIZE)
    for page in pages:
        sequence.tables[0].add(page)
    sequence.append(token_array([0] * context_len))
    work = Work("", context_len, token_array([0] * _NUM_DELTA), _TREE)
    return Pick(sequence, work, _NUM_DELTA, completes=True)


def is_close(expected: Any, found: torch.Tensor, tolerance: float | torch.Tensor) -> bool:
    """True if every row of the two, [1, rows, ...], is the same but for rounding.

    tolerance: of a row's norm; one for all, or [1, rows].
    """
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape:
        return False
    wanted = expected.float()
    error = (found.float() - wanted).flatten(1, -2).norm(dim=-1)
    return bool((error <= tolerance * wanted.flatten(1, -2).norm(dim=-1)).all())
