"""Drafters of one pass: a tree is complete after it, for all requests at once.

`ProductDrafter` is for heads whose pass gives candidates of several positions, none of which knows
the others.  The candidates of a position are the same behind every path, and a tree is their
product: its nodes are taken best first by the product of their shares.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import DraftTask, Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.candidates import RankedRows, RowContext, rank_rows
from cluster.draft.head_drafter import NO_LIMIT, Head, HeadDrafter, HeadRequest
from cluster.draft.head_options import ProductOptions
from cluster.draft.heads.ready import ReadyHead
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.draft.sharpness import conditionals

# What a pass takes of one text.
Input = TypeVar("Input")


class OnePassDrafter(HeadDrafter[HeadRequest, Head], Generic[Head, Input]):
    """See `Drafter`."""

    @abstractmethod
    def _input(self, request: HeadRequest) -> Input | None:
        """The input of a pass behind the text; None where it is not there."""

    @abstractmethod
    def _drafted(self, asked: Sequence[tuple[HeadRequest, int, Input]]) -> Sequence[Proposal]:
        """One pass.  asked: each with how many nodes at most; those that make nothing but NaN are
        to `fail`."""

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`."""
        asked = [
            (request, max_nodes, given)
            for request, max_nodes in self._asked(tasks)
            if request.tree is None and request.can_begin
            if (given := self._input(request)) is not None
        ]
        return self._drafted(asked) if asked else []


class ProductDrafter(OnePassDrafter[Head, Input]):
    """See above."""

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
