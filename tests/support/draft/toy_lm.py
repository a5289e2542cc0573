"""A draft model without a network, whose law depends on the last token alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cluster.core import Commit, DraftTask, Proposal, SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.candidates import rank_rows
from cluster.draft.committed_text import CommittedTextDrafter, common_len
from cluster.draft.drawn import DrawnTrees
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.draft.sharpness import Sharpness
from cluster.draft.tree_request import TreeRequest, expand_nodes


class ToyLM(CommittedTextDrafter[TreeRequest]):
    """Grows trees from rows of logits by the same code as the drafters with networks."""

    def __init__(self, law: np.ndarray, name: str = "a", max_depth: int = 3) -> None:
        """law: float64[vocab, vocab], after each token."""
        super().__init__(DrafterContext(name, 16, 1 << 20), TreeRequest.opened_by)
        self._logits = torch.from_numpy(np.log(law).astype(np.float32))
        self._max_depth = max_depth
        self._drawn = DrawnTrees((2, 1))
        self.params: list[SamplingParams] = []  # of the requests, as they were told

    def _forget_tree(self, request: TreeRequest) -> None:
        request.drop_tree()

    def _advance(self, request: TreeRequest, commit: Commit) -> float | None:
        if commit.params is not None:
            self.params.append(commit.params)
        request.cut(common_len(request.text, commit))
        request.text.append(commit.token_ids[len(request.text) - commit.base_len :])
        request.drop_tree()
        return None

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        found = []
        for request, num_nodes in self._asked(tasks):
            if request.tree is None and request.can_use_drafts:
                self._grow(request)
                found.append(request.proposal(num_nodes, 0.0, self._name))
        return found

    def _grow(self, request: TreeRequest) -> None:
        tree = request.tree = LiveTree()
        request.root_len = len(request.text)
        last, node = int(request.text.token_ids[-1]), ROOT
        while node <= len(tree) and tree.depths[node] < self._max_depth:
            token = last if node == ROOT else tree.tokens[node]
            vocab_size = self._logits.shape[1]
            ranked = rank_rows(
                self._logits[token : token + 1], [request.row_context(node)], vocab_size
            )
            expand_nodes([(request, node)], ranked, [Sharpness()], 2, 1 << 20, self._drawn)
            node += 1
