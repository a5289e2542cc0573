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
from cluster.draft.candidates import Ranking
from cluster.draft.live_tree import LiveTree, Node
from cluster.requests.fields import DraftLaw, Law, Laws
from cluster.spec.noise import gumbel

# The share of texts that are taken to go on with each sibling, in the order of drawing; none is
# above those before it, without which it may not be verified.  Verification corrects these claims.
_SHARES = (0.6, 0.06, 0.034, 0.03)


def drawn_children(
    widths: Sequence[int], law: Law, depth: int, ranking: Ranking
) -> list[tuple[int, float]]:
    """Return the children of a node at this depth as pairs of token and claimed probability.

    widths: the children of a node under the law of siblings, by its depth; the last one is that of
    all deeper nodes.
    """
    width = widths[min(depth, len(widths) - 1)] if law == "multi_step" else 1
    alive = ranking.token_ids[: np.isfinite(ranking.scores).sum()][:width].tolist()
    return list(zip(alive, _SHARES, strict=False))


def laws_of(tree: LiveTree, nodes: Sequence[Node], params: SamplingParams, position: int) -> Laws:
    """Return the laws that these nodes of a tree were drawn from, by their parents' places.

    position: the output position of the root's children.
    """
    places = {tree.root: -1, **{node: place for place, node in enumerate(nodes)}}
    laws: dict[int, DraftLaw] = {}
    for parent in sorted({node.parent for node in nodes}, key=places.__getitem__):
        ranking = parent.ranking
        assert ranking is not None, "a node with children has a ranking"
        noise = gumbel(params.noise_key, position + parent.depth, ranking.token_ids, params.stream)
        alive = np.isfinite(ranking.scores)
        weights = ranking.scores[alive] - noise[alive]
        probs = np.exp(weights - weights.max())
        laws[places[parent]] = DraftLaw(ranking.token_ids[alive], probs / probs.sum())
    return laws
