"""Drafters whose one pass gives candidates of several positions, none of which knows the others.

The candidates of a position are the same behind every path, and a tree is their product: its nodes
are taken best first by the product of their shares.
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
from cluster.draft.head_drafter import NO_LIMIT, Head, HeadDrafter
from cluster.draft.head_options import ProductOptions
from cluster.draft.heads.ready import ReadyHead
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.draft.sharpness import conditionals
from cluster.draft.tree_request import TreeRequest

# What a pass takes of one text.
Input = TypeVar("Input")


class ProductDrafter(HeadDrafter[TreeRequest, Head], Generic[Head, Input]):
    """See `Drafter`.  A tree is complete after one pass over all requests."""

    def __init__(
        self, context: DrafterContext, ready: ReadyHead[Head], options: ProductOptions,
        num_positions: int,
    ) -> None:  # fmt: skip
        """num_positions: that a pass gives candidates of."""
        # Positions further ahead are less sure.
        super().__init__(context, ready, TreeRequest, num_positions)
        self._options = options

    @abstractmethod
    def _input(self, request: TreeRequest) -> Input | None:
        """The input of a pass behind the text; None where it is not there."""

    @abstractmethod
    def _logits(self, requests: Sequence[TreeRequest], inputs: Sequence[Input]) -> torch.Tensor:
        """One pass: float32[requests, positions, draft_vocab]."""

    def _warm_up_with(self, given: Input) -> None:
        request = self._request_of_nobody()
        self._proposal(request, 1, self._logits([request], [given])[0].nan_to_num())

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`."""
        wanted: list[tuple[TreeRequest, int]] = []
        inputs: list[Input] = []
        for request, max_nodes in self._asked(tasks):
            is_wanted = request.tree is None and request.can_use_drafts
            given = self._input(request) if is_wanted else None
            if given is not None:
                wanted.append((request, max_nodes))
                inputs.append(given)
        if not wanted:
            return []
        logits = self._logits([request for request, _ in wanted], inputs)
        is_sound = torch.isfinite(logits.sum(dim=(1, 2))).tolist()
        return [
            self._proposal(request, max_nodes, rows)
            for (request, max_nodes), rows, is_finite in zip(wanted, logits, is_sound, strict=True)
            if is_finite
        ]

    def _proposal(self, request: TreeRequest, max_nodes: int, logits: torch.Tensor) -> Proposal:
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
        self, request: TreeRequest, tree: LiveTree, node: int, ranked: RankedRows,
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
