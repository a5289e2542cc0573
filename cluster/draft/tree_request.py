"""A request whose tree grows from a network's logits: what the nodes' draws depend on, what they
become in the tree, and which part of it is worth proposing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, Proposal, token_array
from cluster.draft.base import is_useful
from cluster.draft.candidates import Ranking, RowContext
from cluster.draft.committed_text import RequestState
from cluster.draft.drawn import laws_of
from cluster.draft.live_tree import LiveTree, Node

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

    def drop_tree(self) -> None:
        """End the present tree."""
        self.tree = None

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
            laws = laws_of(self.live, nodes, self.params, self.next_position)
            found = replace(found, laws=laws)
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
