"""Medusa and P-EAGLE: drafters whose one pass gives candidates of several positions, none of which
knows the others.

The candidates of a position are the same behind every path, and a tree is their product: its nodes
are taken best first by the product of their shares.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.candidates import RankedRows, RowContext, rank_rows
from cluster.draft.head_attention import Part, Span, SpanAttention
from cluster.draft.head_cache import HeadCache, HeadContext, layers
from cluster.draft.head_drafter import NO_LIMIT, Head, HeadRequest, Input, OnePassDrafter
from cluster.draft.head_options import MedusaOptions, PeagleOptions, ProductOptions
from cluster.draft.heads.checkpoint import read_config
from cluster.draft.heads.eagle3 import layer_of
from cluster.draft.heads.load import ReadyHead, ready_head
from cluster.draft.heads.medusa import MedusaHead
from cluster.draft.heads.peagle import ParallelHead, num_layers_of
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.draft.sharpness import conditionals
from cluster.engine.types import LayerSpec
from cluster.models.resolve import resolve_head


class ProductDrafter(OnePassDrafter[Head, Input]):
    """The growth of such trees."""

    def __init__(
        self, context: DrafterContext, ready: ReadyHead[Head], options: ProductOptions,
        num_positions: int,
    ) -> None:  # fmt: skip
        """num_positions: that a pass gives candidates of."""
        # Positions further ahead are less sure.
        super().__init__(context, ready, HeadRequest, num_positions)
        self._options = options

    @abstractmethod
    def _logits(self, requests: Sequence[HeadRequest], inputs: Sequence[Input]) -> torch.Tensor:
        """One pass: float32[requests, positions, draft_vocab]."""

    def _warm_up_with(self, given: Input) -> None:
        request = self._request_of_nobody()
        self._proposal(request, 1, self._logits([request], [given])[0].nan_to_num())

    def _drafted(self, asked: Sequence[tuple[HeadRequest, int, Input]]) -> Sequence[Proposal]:
        logits = self._logits([each[0] for each in asked], [each[2] for each in asked])
        is_sound = torch.isfinite(logits.sum(dim=(1, 2))).tolist()
        proposals = []
        for (request, max_nodes, _), rows, is_finite in zip(asked, logits, is_sound, strict=True):
            if is_finite:
                proposals.append(self._proposal(request, max_nodes, rows))
            else:
                request.fail()
        return proposals

    def _proposal(self, request: HeadRequest, max_nodes: int, logits: torch.Tensor) -> Proposal:
        """The best of the product.  logits: float32[positions, draft_vocab]."""
        options, least = self._options, self._options.min_survival
        request.tree, request.root_len = LiveTree(), len(request.text)
        root, num_positions = request.row_context(ROOT), len(logits)
        contexts: list[RowContext] = [
            replace(root, position=root.position + ahead) for ahead in range(num_positions)
        ]
        ranked = rank_rows(logits, contexts, options.num_candidates, self._vocabulary)
        shares = conditionals(ranked.scores, self._fits_of(request))
        self._expand(request, request.tree, ROOT, ranked, shares)
        for _ in range(max_nodes):
            if request.tree.best_leaf_survival() < least:
                break
            self._expand(request, request.tree, request.tree.pop_leaf(), ranked, shares)
        proposal = request.proposal(max_nodes, least, self._name)
        return replace(proposal, is_complete=True)

    def _expand(
        self, request: HeadRequest, tree: LiveTree, node: int, ranked: RankedRows,
        shares: npt.NDArray[np.float64],
    ) -> None:  # fmt: skip
        depth = tree.depths[node]
        if depth == len(shares):
            return
        count = self._options.num_children
        children = zip(
            ranked.token_ids[depth, :count].tolist(), shares[depth, :count].tolist(), strict=True
        )
        request.expand(node, ranked.row(depth), list(children), NO_LIMIT)


class MedusaDrafter(ProductDrafter[MedusaHead, torch.Tensor]):
    """Heads on the target's last hidden row, one a position ahead: it drafts from the last step's
    rows alone."""

    @torch.inference_mode()
    def __init__(self, context: DrafterContext, options: MedusaOptions) -> None:
        host = host_of(context.target, context.name, "medusa")
        ready = ready_head(MedusaHead, options.model, host)
        spec = ready.head.spec
        super().__init__(context, ready, options, spec.num_heads)
        self.wants = StepWants((-1,))
        self._rows: dict[str, tuple[int, torch.Tensor]] = {}
        self._warm_up_with(torch.zeros(spec.hidden_size, dtype=self._dtype, device=host.device))

    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: of each text the last row is kept, until the next step."""
        self._rows = {
            each.request_id: (
                each.first_position + len(each.text_rows),
                each.taps[int(each.text_rows[-1]), 0],
            )
            for each in rows
            if each.taps is not None and each.next_token is not None
        }

    def _input(self, request: HeadRequest) -> torch.Tensor | None:
        length, hidden = self._rows.get(request.request_id, (0, None))
        return hidden if length == len(request.text) - 1 else None

    def _logits(
        self, requests: Sequence[HeadRequest], inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        hidden = torch.stack(list(inputs)).to(self._dtype)
        logits: torch.Tensor = self._head(hidden).float()
        return logits


class PeagleDrafter(ProductDrafter[ParallelHead, HeadContext]):
    """An EAGLE-3 head that drafts all positions ahead in one pass: P-EAGLE.

    What it keeps of a text is kept as for EAGLE-3, for each of its layers."""

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
