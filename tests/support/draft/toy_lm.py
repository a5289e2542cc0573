"""A draft model without a network, whose law depends on the last token alone."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from cluster.core import Commit, Observation, Proposal
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.tree_drafter import TreeDrafter, TreeRequest


class ToyLM(TreeDrafter[TreeRequest]):
    """Grows trees from rows of logits by the same code as the drafters with networks."""

    def __init__(self, law: np.ndarray, name: str = "a", max_depth: int = 3) -> None:
        """law: float64[vocab, vocab], after each token."""
        super().__init__(DrafterContext(name, 16, 1 << 20), TreeRequest.opened_by)
        self._options = SimpleNamespace(
            num_candidates=len(law), num_children=2, min_survival=0.0, drawn_children=(2, 1)
        )
        self._vocabulary = None
        self._logits = torch.from_numpy(np.log(law).astype(np.float32))
        self._max_depth = max_depth
        self.params = []  # of the requests, as they were told

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        self.params += [each.params for each in commits if each.params is not None]
        return super().observe(commits)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        found = []
        for request, num_nodes in self._asked(tasks):
            if request.tree is None and request.can_use_drafts:
                self._grow(request)
                found.append(request.proposal(num_nodes, 0.0, self._name))
        return found

    def _grow(self, request: TreeRequest) -> None:
        tree = request.begin()
        for node in tree.nodes:  # which grow meanwhile
            if node.depth < self._max_depth:
                logits = self._logits[node.token : node.token + 1]
                self._expand([(request, node)], logits)
