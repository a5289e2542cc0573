"""The base of drafters whose trees grow from a network's logits, best first.

Of each request: what its nodes' draws depend on, what they become in the tree, and which part of it
is worth proposing.

Under the textbook's laws of acceptance drafts are drawn from the model's law.  The best K of a
node's candidates by log-probability plus Gumbel noise are K draws without replacement, in the order
of drawing, so ranking with the noise of a key of the drafter's own draws them.  Nothing that shapes
such a tree may look at a drawn token: the number of a node's children follows from its depth, and
what becomes of a node from the ranks on its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, Commit, Proposal, SamplingParams, token_array
from cluster.draft.base import DrafterContext, is_useful
from cluster.draft.candidates import Ranking, RowContext, Sharpness, conditionals, rank_rows
from cluster.draft.committed_text import CommittedTextDrafter, RequestState, by_key
from cluster.draft.live_tree import LiveTree, Node
from cluster.draft.vocabulary import DraftVocabulary
from cluster.requests.fields import DraftLaw, Law, Laws
from cluster.spec.noise import gumbel

# While a tree grows, it is sent only if it gains this many expected accepted tokens.
_MIN_NEWS = 0.1


@dataclass(slots=True, eq=False)
class TreeRequest(RequestState):
    """tree: its root is after root_len tokens of the text; None while there is none.
    max_context_len: positions that the network has."""

    tree: LiveTree | None = None
    root_len: int = 0
    max_context_len: int = 1 << 62
    _proposed: Proposal | None = None

    @property
    def live(self) -> LiveTree:
        """The tree, where there is one."""
        assert self.tree is not None
        return self.tree

    def position_after(self, node: Node) -> int:
        """Output position of the token that follows `node`."""
        return self.root_len - self.prompt_len + node.depth

    def network_len(self, length: int) -> int:
        """Tokens that the network reads of the text's first `length`."""
        return length

    def row_context(self, node: Node) -> RowContext:
        """The conditions of the target's draw at `node`."""
        position, params = self.position_after(node), self.params
        if not params.has_penalties:
            return RowContext(params, position)
        prompt, output = np.split(self.text.token_ids[: self.root_len], [self.prompt_len])
        path = token_array(self.live.path_tokens(node))
        return RowContext(params, position, (prompt, np.concatenate((output, path))))

    @property
    def can_use_drafts(self) -> bool:
        """True if a draft behind the text could still save a step."""
        return len(self.text) > 0 and 0 <= self.next_position < self.params.max_tokens - 1

    def begin(self) -> LiveTree:
        """A new tree behind the text."""
        self.tree, self.root_len = LiveTree(int(self.text.token_ids[-1])), len(self.text)
        return self.tree

    def expand(self, node: Node, ranking: Ranking, candidates: Sequence[tuple[int, float]]) -> None:
        """Add children to `node`.  candidates: (token, conditional probability), best first."""
        position = self.position_after(node)
        children = [
            (token, node.survival * conditional)
            for token, conditional in candidates
            if conditional > 0.0 and is_useful(self.params, position, token)
        ]
        # The network's position of a child; it has none beyond the limit.
        place = self.network_len(self.root_len) + node.depth
        grows = place < self.max_context_len and position + 2 < self.params.max_tokens
        self.live.expand(node, ranking, children, grows=grows)

    def proposal(
        self, max_nodes: int, min_survival: float, drafter: str, *, is_growing: bool = False
    ) -> Proposal:
        """The current tree as a proposal; the former object if nothing worth sending changed.

        The tree is empty while the root is behind the text, as it does not continue that text.
        The same nodes with different survivals are not worth a frame; nor is a small gain of a
        tree that is_growing (_MIN_NEWS).
        """
        nodes, tree, survival = list[Node](), EMPTY_TREE, EMPTY_FLOATS
        if self.tree is not None and self.root_len == len(self.text):
            nodes = self.tree.best_nodes(max_nodes, min_survival)
            tree, survival = self.tree.of(nodes)
        found = self.proposed(tree, survival, drafter, is_complete=not is_growing)
        former = self._proposed
        if former is not None and not _is_news(former, found, is_growing):
            return former
        if nodes and not self.params.is_coupled:
            found = replace(found, laws=laws_of(self.live, nodes, self.params, self.next_position))
        self._proposed = found
        return found


def _is_news(former: Proposal, found: Proposal, is_growing: bool) -> bool:
    """True if the tree of `found` is worth a frame."""
    if (former.base_len, former.prefix_hash, former.generation) != (
        found.base_len,
        found.prefix_hash,
        found.generation,
    ):
        return True
    if is_growing and float(found.survival.sum() - former.survival.sum()) < _MIN_NEWS:
        return False
    return not (
        np.array_equal(former.tree.token_ids, found.tree.token_ids)
        and np.array_equal(former.tree.parents, found.tree.parents)
    )


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


Request = TypeVar("Request", bound=TreeRequest)


class TreeDrafter(CommittedTextDrafter[Request]):
    """What a tree grows by, and what is learnt of it.

    _vocabulary: of the logits' columns, None = the target's.
    """

    _options: Any
    _vocabulary: DraftVocabulary | None

    def __init__(self, context: DrafterContext, open_request: Callable[[Commit], Request]) -> None:
        super().__init__(context, open_request)
        self._sharpness = by_key(lambda: [Sharpness() for _ in range(self._num_positions)])

    @property
    def _max_rows(self) -> int:
        """Nodes that a pass expands at most."""
        return self._options.max_rows

    @property
    def _num_positions(self) -> int:
        """Positions ahead, the last of them for all behind it, that are calibrated each by itself:
        those further ahead are less sure."""
        return 1

    def _fits_of(self, request: Request) -> list[Sharpness]:
        return self._sharpness(request.group)

    def _forget_tree(self, request: Request) -> None:
        request.tree = None

    def _ranked(self, logits: torch.Tensor, rows: Sequence[RowContext]) -> Ranking:
        return rank_rows(logits, rows, self._options.num_candidates, self._vocabulary)

    def _learn(self, request: Request) -> list[Node]:
        """Learn from the text behind the tree's root; returns the tree's nodes of it, as far as it
        has them."""
        tree, token_ids = request.live, request.text.token_ids[request.root_len :].tolist()
        path = tree.walk(token_ids)
        if not request.params.is_coupled:
            return path
        # The draws at the root and below it, the last fit for all that follow.
        fits = self._fits_of(request)
        for depth, (node, token) in enumerate(zip((tree.root, *path), token_ids, strict=False)):
            ranking = node.ranking
            if ranking is None or np.isnan(ranking.scores[0]):
                break
            fits[min(depth, len(fits) - 1)].learn(ranking.scores, ranking.rank_of(token))
        return path

    def _expand(self, rows: Sequence[tuple[Request, Node]], logits: torch.Tensor) -> None:
        """Give nodes the best of their candidates as children, and the grafts that are candidates.

        logits: float32[rows, columns]."""
        ranked = self._ranked(logits, [request.row_context(node) for request, node in rows])
        requests, nodes = zip(*rows, strict=True)
        self._give_children(requests, nodes, ranked)

    def _give_children(
        self, requests: Sequence[Request], nodes: Iterable[Node], ranked: Ranking
    ) -> None:
        """Give nodes their children.

        requests: of each row.  nodes: each is asked for once those before it have their children.
        """
        num_children = self._options.num_children
        shares = conditionals(ranked.scores, [self._fits_of(request)[0] for request in requests])
        tokens = ranked.token_ids[:, :num_children].tolist()
        best = shares[:, :num_children].tolist()
        for index, (request, node) in enumerate(zip(requests, nodes, strict=True)):
            ranking = ranked.row(index)
            if not request.params.is_coupled:
                widths, law = self._options.drawn_children, request.params.law
                children = drawn_children(widths, law, node.depth, ranking)
            else:
                children = list(zip(tokens[index], best[index], strict=True))
                for token in node.children:  # grafts
                    rank = ranking.rank_of(token)
                    if rank is not None and rank >= num_children:
                        children.append((token, float(shares[index, rank])))
            request.expand(node, ranking, children)

    def _leaves(self, growing: Sequence[tuple[Request, int]]) -> list[tuple[Request, list[Node]]]:
        """The leaves of the highest survival over all requests, for the next pass to expand.

        growing: each with the nodes asked for.  Returns those that have some, ascending, so that
        parents come before children in the engine as they do in the tree."""
        offered: list[tuple[float, int]] = []
        most_of_one = min(self._max_rows, self._options.width * len(growing))
        for index, (request, num_asked) in enumerate(growing):
            room = self._num_expanded(num_asked) - len(request.live.expanded)
            least = self._least(request.tree, num_asked)
            survivals = request.live.best_leaf_survivals(min(room, most_of_one))
            offered += [(-survival, index) for survival in survivals if survival >= least]
        num_growing = len({index for _, index in offered})
        most = min(self._max_rows, self._options.width * num_growing)
        num_chosen = Counter(index for _, index in sorted(offered)[:most])
        return [
            (growing[index][0], growing[index][0].live.pop_leaves(count))
            for index, count in sorted(num_chosen.items())
        ]

    def _num_expanded(self, num_asked: int) -> int:
        """How many nodes may be expanded for a task that asks for `num_asked` nodes."""
        return num_asked

    def _least(self, tree: LiveTree | None, num_asked: int) -> float:
        """The survival of a leaf that is worth a row of the network."""
        least: float = self._options.min_survival
        return least if tree is None else max(least, tree.least_worth(num_asked))

    def _proposal(self, request: Request, num_asked: int) -> Proposal:
        is_growing, least = self._is_growing(request, num_asked), self._options.min_survival
        return request.proposal(num_asked, least, self._name, is_growing=is_growing)

    def _is_growing(self, request: Request, num_asked: int) -> bool:
        """True if there will be a tree behind the text, or it has a leaf that is worth a row."""
        tree = request.tree
        if tree is None or request.root_len < len(request.text):
            return True
        is_worth = tree.best_leaf_survival() >= self._least(tree, num_asked)
        return is_worth and len(tree.expanded) < self._num_expanded(num_asked)
