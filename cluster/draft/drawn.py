"""Drafts that are drawn from a model's law, for texts under the textbook's laws of acceptance.

The best K of a node's candidates by log-probability plus Gumbel noise are K draws without
replacement, in the order of drawing, so ranking with the noise of a key of the drafter's own draws
them.  Nothing that shapes such a tree may look at a drawn token: the number of a node's children
follows from its depth, and what becomes of a node from the ranks on its path.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.core import SamplingParams
from cluster.draft.bounded import by_key
from cluster.draft.candidates import Ranking
from cluster.draft.committed_text import RequestState
from cluster.draft.live_tree import ROOT, LiveTree
from cluster.requests.fields import DraftLaw, Laws
from cluster.spec.noise import gumbel

# What is assumed before any outcome: the share of texts that go on with each sibling where they do
# not with those before it, in the order of drawing, and the weight of that in outcomes.
_PRIOR_SHARES = (0.6, 0.15, 0.1, 0.1)
_PRIOR = 20.0
_DECAY = 0.999


class RankShares:
    """How often texts go on with each sibling, by its rank in the order of drawing."""

    def __init__(self) -> None:
        self._tried = [_PRIOR] * len(_PRIOR_SHARES)
        self._kept = [_PRIOR * share for share in _PRIOR_SHARES]

    def learn(self, siblings: Sequence[int], token: int) -> None:
        """Enter the token with which a text went on after the parent of these siblings."""
        for rank, sibling in enumerate(siblings[: len(_PRIOR_SHARES)]):
            self._tried[rank] = _DECAY * self._tried[rank] + 1.0
            self._kept[rank] = _DECAY * self._kept[rank] + (sibling == token)
            if sibling == token:
                return

    def claims(self) -> list[float]:
        """Return the probability of each sibling; none is above that of an earlier one, because
        none may be verified without those."""
        found, left, most = [], 1.0, 1.0
        for tried, kept in zip(self._tried, self._kept, strict=True):
            most = min(left * kept / tried, most)
            found.append(most)
            left *= 1.0 - kept / tried
        return found


class DrawnTrees:
    """The shape of drawn trees, and what becomes of their nodes."""

    def __init__(self, widths: Sequence[int]) -> None:
        """widths: the children of a node under the law of siblings, by its depth; the last one is
        that of all deeper nodes."""
        self._widths = widths
        self._shares = by_key(RankShares)

    def children(
        self, request: RequestState, tree: LiveTree, node: int, ranking: Ranking
    ) -> list[tuple[int, float]]:
        """Return the children of a node as pairs of token and claimed probability."""
        depth = min(tree.depths[node], len(self._widths) - 1)
        width = self._widths[depth] if request.params.law == "multi_step" else 1
        alive = ranking.token_ids[: np.isfinite(ranking.scores).sum()][:width].tolist()
        return list(zip(alive, self._shares_of(request).claims(), strict=False))

    def learn(
        self, request: RequestState, tree: LiveTree, path: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Enter the tokens that a text went on with.  path: their nodes, as far as it goes."""
        shares = self._shares_of(request)
        for node, token in zip((ROOT, *path), token_ids, strict=False):
            shares.learn(tree.child_tokens(node), token)

    def _shares_of(self, request: RequestState) -> RankShares:
        return self._shares((request.task, request.params.law))


def laws_of(tree: LiveTree, nodes: Sequence[int], params: SamplingParams, position: int) -> Laws:
    """Return the laws that these nodes of a tree were drawn from, by their parents' places.

    position: the output position of the root's children.
    """
    places = {ROOT: -1, **{node: place for place, node in enumerate(nodes)}}
    parents = sorted({tree.parents[node] for node in nodes})
    laws: dict[int, DraftLaw] = {}
    for parent in parents:
        ranking = tree.rankings[parent]
        assert ranking is not None, "a node with children has a ranking"
        noise = gumbel(
            params.noise_key, position + tree.depths[parent], ranking.token_ids, params.stream
        )
        alive = np.isfinite(ranking.scores)
        weights = ranking.scores[alive] - noise[alive]
        probs = np.exp(weights - weights.max())
        laws[places[parent]] = DraftLaw(ranking.token_ids[alive], probs / probs.sum())
    return laws
