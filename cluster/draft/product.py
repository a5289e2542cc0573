"""Drafters whose one pass gives candidates of several positions, none of which knows the others.

The candidates of a position are the same behind every path, and a tree is their product: its nodes
are taken best first by the product of their shares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import Commit, DraftTask, Observation, Proposal, SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.candidates import RankedRows, RowContext, rank_rows
from cluster.draft.committed_text import RequestTable, common_len
from cluster.draft.head_options import ProductOptions
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.draft.sharpness import Sharpness, conditionals
from cluster.draft.tree_request import TreeRequest, learn_draws
from cluster.draft.vocabulary import DraftVocabulary

_NO_LIMIT = 1 << 62

# What a pass takes of one text.
Input = TypeVar("Input")


class ProductDrafter(ABC, Generic[Input]):
    """See `Drafter`.  A tree is complete after one pass over all requests."""

    def __init__(
        self, context: DrafterContext, options: ProductOptions, num_positions: int,
        vocabulary: DraftVocabulary | None,
    ) -> None:  # fmt: skip
        """num_positions: that a pass gives candidates of.  vocabulary: of its logits' columns."""
        self._options = options
        self._name = context.name
        self._max_nodes = context.max_nodes
        self._vocabulary = vocabulary
        self._requests: RequestTable[TreeRequest] = RequestTable(context.max_requests, self._opened)
        # By position: those further ahead are less sure.
        self._sharpness: Bounded[list[Sharpness]] = Bounded(
            lambda: [Sharpness() for _ in range(num_positions)]
        )

    @abstractmethod
    def _input(self, request: TreeRequest) -> Input | None:
        """What a pass behind the text takes; None where it is not there."""

    @abstractmethod
    def _logits(self, requests: Sequence[TreeRequest], inputs: Sequence[Input]) -> torch.Tensor:
        """One pass: float32[requests, positions, draft_vocab]."""

    def _warm_up_with(self, given: Input) -> None:
        """Draft once for nobody: first calls take longer than all that follow."""
        request = TreeRequest(0, 1, "", SamplingParams(temperature=1.0, seed=0))
        request.text.append(np.zeros(2, np.int32))
        self._proposal(request, 1, self._logits([request], [given])[0].nan_to_num())

    def _opened(self, commit: Commit) -> TreeRequest:
        return TreeRequest(
            commit.generation, commit.prompt_len, commit.task, commit.params or SamplingParams(),
            request_id=commit.request_id, tenant=commit.tenant,
        )  # fmt: skip

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """See `Drafter.observe`."""
        return [self._observe(commit) for commit in commits]

    def _observe(self, commit: Commit) -> Observation:
        request = self._requests.admit(commit)
        if request is None:
            return self._requests.declined(commit)
        loss: float | None = None
        if request.renewed:
            request.renewed = False
            request.tree = None
        if not request.text.ends_with(commit.token_ids, commit.base_len):
            kept = common_len(request.text, commit)
            request.cut(kept)
            request.text.append(commit.token_ids[kept - commit.base_len :])
            loss = self._learn(request)
            request.tree = None
        return Observation(commit.request_id, commit.generation, len(request.text), loss)

    def _learn(self, request: TreeRequest) -> float | None:
        tree = request.tree
        if tree is None:
            return None
        token_ids = request.text.token_ids[request.root_len :].tolist()
        return learn_draws(self._fits_of(request), tree, tree.walk(token_ids), token_ids)

    def _fits_of(self, request: TreeRequest) -> list[Sharpness]:
        return self._sharpness.of((request.task, request.params.temperature == 0.0))

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`."""
        wanted: list[tuple[TreeRequest, int]] = []
        inputs: list[Input] = []
        for task in tasks:
            request = self._requests.get(task.request_id, task.generation)
            if request is None or request.tree is not None or task.max_nodes < 1:
                continue
            given = self._input(request) if request.can_use_drafts else None
            if given is not None:
                wanted.append((request, min(task.max_nodes, self._max_nodes)))
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
        fits = self._fits_of(request)
        shares = conditionals(
            ranked.scores,
            np.array([fit.tau for fit in fits]),
            np.array([fit.coverage for fit in fits]),
        )
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
        request.expand(node, ranked.row(depth), list(children), _NO_LIMIT)

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`."""
        for request_id in request_ids:
            self._requests.pop(request_id)
