"""The base of drafters whose trees grow from a network's logits, best first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from cluster.core import Commit, Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.candidates import Ranking, RowContext, rank_rows
from cluster.draft.committed_text import CommittedTextDrafter, by_key
from cluster.draft.drawn import drawn_children
from cluster.draft.live_tree import LiveTree, Node
from cluster.draft.sharpness import Sharpness, conditionals
from cluster.draft.tree_request import TreeRequest
from cluster.draft.vocabulary import DraftVocabulary

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
        found: int = self._options.max_rows
        return found

    @property
    def _num_positions(self) -> int:
        """Positions ahead, the last of them for all behind it, that are calibrated each by itself:
        those further ahead are less sure."""
        return 1

    def _fits_of(self, request: Request) -> list[Sharpness]:
        return self._sharpness(request.group)

    def _forget_tree(self, request: Request) -> None:
        request.drop_tree()

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
        for index, (request, num_asked) in enumerate(growing):
            room = self._num_expanded(num_asked) - len(request.live.expanded)
            least = self._least(request.tree, num_asked)
            survivals = request.live.best_leaf_survivals(room)
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
