"""The P-EAGLE drafter: an EAGLE-3 head that drafts all positions ahead in one pass.

What it keeps of a text is kept as for EAGLE-3 (`cluster.draft.head_cache`), for each of its layers.
No row of a pass knows what the others draft: a tree is the product of their candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cluster.draft.base import DrafterContext
from cluster.draft.head_attention import Part, Span, SpanAttention
from cluster.draft.head_cache import HeadCache, HeadContext, layers
from cluster.draft.head_drafter import HeadRequest
from cluster.draft.head_options import PeagleOptions
from cluster.draft.heads.checkpoint import read_config
from cluster.draft.heads.eagle3 import layer_of
from cluster.draft.heads.peagle import ParallelHead, num_layers_of
from cluster.draft.heads.ready import ready_head
from cluster.draft.inside import StepWants, host_of
from cluster.draft.product import ProductDrafter
from cluster.engine.types import LayerSpec
from cluster.models.resolve import resolve_head


class PeagleDrafter(ProductDrafter[ParallelHead, HeadContext]):
    """See `Drafter` and `StepReader`."""

    _cache: HeadCache

    @torch.inference_mode()
    def __init__(self, context: DrafterContext, options: PeagleOptions) -> None:
        host = host_of(context.target, context.name, "peagle")
        ready = ready_head(ParallelHead, options.model, host)
        head = ready.head
        self._num_drafts = options.num_drafts or head.num_drafts
        super().__init__(context, ready, options, self._num_drafts)
        self.wants = StepWants(head.spec.taps)
        self._cache = HeadCache(host, head, self._dtype, options.context)
        layer = head.spec.layer
        hidden = torch.zeros(layer.hidden_size, dtype=self._dtype, device=host.device)
        rows = hidden.new_zeros(0, layer.num_key_value_heads, layer.head_dim)
        nothing = ((rows, rows),) * head.num_layers
        self._warm_up_with(HeadContext(np.empty(0, np.int64), nothing, hidden))

    @classmethod
    def kv_layers(cls, options: PeagleOptions, like: LayerSpec) -> Sequence[LayerSpec]:
        """See `StepReader`."""
        folder = resolve_head(options.model)
        config = read_config(folder)
        return layers(layer_of(folder, config), like, num_layers_of(folder, config))

    def _input(self, request: HeadRequest) -> HeadContext | None:
        return self._cache.read(request.request_id, request.text.token_ids)

    def _logits(
        self, requests: Sequence[HeadRequest], inputs: Sequence[HeadContext]
    ) -> torch.Tensor:
        hidden, size = torch.stack([each.hidden for each in inputs]), self._num_drafts
        device = hidden.device
        own = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        parts: list[Part] = []
        for each in inputs:
            mask = torch.nn.functional.pad(own, (len(each.positions), 0), value=True)
            parts.append(Part(Span(each.layers), size, [mask] * len(each.layers)))
        texts = [request.text.token_ids for request in requests]
        rows = self._head.draft(
            torch.tensor([int(text[-1]) for text in texts], device=device),
            hidden,
            # The head's row of a token stands where the hidden row before it does.
            torch.tensor([len(text) - 2 for text in texts], device=device),
            size,
            SpanAttention(parts),
        )
        return self._head.logits(rows).float()
