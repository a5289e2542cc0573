"""The growing tree of a draft model: expanded nodes, which have KV, and leaves, which do not yet.

A tree has a few hundred nodes and changes by a few at a time; objects are faster than arrays there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray, TokenTree
from cluster.draft.candidates import Ranking
from cluster.engine.cpu.growth import Grown

# How much of its parent's survival a node is taken to keep.  EAGLE-3 on SmolLM2, steps of 8 nodes:
# 0.5, 0.35 and 0.25 take 2.8, 2.5 and 2.4 passes per step, and expanding whatever is likely takes
# 3.5, all for the same tokens per step.
KEPT_SHARE = 0.35


class Node:
    """A token of a tree.

    An *expanded* node has KV and a ranking; the root is always expanded.  Every other expanded node
    has a *slot*: its index in the engine's tree, assigned in the order of expansion.  A leaf has no
    KV, ranking (None) or slot (-1).  A *graft* is a node of another drafter's tree, evaluated in
    one pass with those above it: its survival is 0 until its parent has a ranking, and stays so if
    it is no candidate.

    parent: the root's is the root.  index: its place among the tree's nodes.  children: by their
    tokens.  handed_on: what a draft head's rows of its children take in place of the
    target's hidden row, [hidden].
    """

    def __init__(
        self, token: int, survival: float, parent: Node | None = None, index: int = 0
    ) -> None:
        self.token, self.survival, self.index = token, survival, index
        self.parent: Node = parent or self
        self.depth: int = parent.depth + 1 if parent else 0
        self.slot = -1
        self.ranking: Ranking | None = None
        self.children: dict[int, Node] = {}
        self.handed_on: Any = None


class LiveTree:
    """nodes: parents before children, the root first, which is the last committed token.
    expanded: those with slots, in the order of these."""

    def __init__(self, last_token: int = -1) -> None:
        self.root = Node(last_token, 1.0)
        self.nodes = [self.root]
        self.expanded: list[Node] = []
        self._frontier: list[tuple[float, int]] = []  # heap of (-survival, a leaf's index)

    def __len__(self) -> int:
        """The number of nodes below the root."""
        return len(self.nodes) - 1

    def best_leaf_survival(self) -> float:
        """The survival of the leaf to expand next, 0 if there is none."""
        return -self._frontier[0][0] if self._frontier else 0.0

    def best_survivals(self, count: int) -> list[float]:
        """Of the `count` likeliest nodes below the root, best first; of all if they are fewer."""
        return sorted((node.survival for node in self.nodes[1:]), reverse=True)[:count]

    def least_worth(self, num_wanted: int) -> float:
        """Leaves of a lower survival hardly have a child among the `num_wanted` likeliest nodes."""
        if len(self) < num_wanted:
            return 0.0
        return self.best_survivals(num_wanted)[-1] / KEPT_SHARE

    def best_leaf_survivals(self, count: int) -> list[float]:
        """Of the `count` likeliest leaves, best first; of all if they are fewer."""
        return [-survival for survival, _ in heapq.nsmallest(count, self._frontier)]

    def pop_leaf(self) -> Node:
        """Remove the most likely leaf from the frontier in order to expand it."""
        return self.nodes[heapq.heappop(self._frontier)[1]]

    def pop_leaves(self, count: int) -> list[Node]:
        """Remove so many; ascending."""
        return sorted((self.pop_leaf() for _ in range(count)), key=attrgetter("index"))

    def assign_slots(self, leaves: Sequence[Node]) -> None:
        """Give `leaves`, which are about to be evaluated, the engine's next slots."""
        for leaf in leaves:
            leaf.slot = len(self.expanded)
            self.expanded.append(leaf)

    def engine_tree(self) -> TokenTree:
        """The nodes with slots, in slot order."""
        nodes = self.expanded
        return TokenTree.of([node.token for node in nodes], [node.parent.slot for node in nodes])

    def expand(
        self, node: Node, ranking: Ranking, children: Sequence[tuple[int, float]], *, grows: bool
    ) -> None:
        """Give `node` its ranking and its `children`, pairs of (token, survival).

        grows: whether the children may be expanded in turn.  A graft below it is the child of its
        token.
        """
        node.ranking = ranking
        for token, survival in children:
            if token in node.children:
                node.children[token].survival = survival
                continue
            self._append(token, survival, node)
            if grows:
                heapq.heappush(self._frontier, (-survival, len(self)))

    def graft(self, tree: TokenTree) -> Sequence[Node]:
        """Add the nodes of another drafter's tree to this one, which has none yet; returns them."""
        for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
            self._append(token, 0.0, self.nodes[parent + 1])
        grafts = self.nodes[1:]
        self.assign_slots(grafts)
        return grafts

    def take(self, leaf: Node) -> None:
        """Remove a leaf from the frontier, and give it the next slot."""
        self._frontier = [each for each in self._frontier if each[1] != leaf.index]
        heapq.heapify(self._frontier)
        self.assign_slots([leaf])

    def leaves(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """The leaves to expand as native code takes them, and their survivals; see `Growing`."""
        nodes = [self.nodes[index] for _, index in self._frontier]
        rows = [(node.index, node.token, node.parent.slot, node.depth) for node in nodes]
        survivals = [node.survival for node in nodes]
        return np.array(rows, np.int32).reshape(-1, 4).T, np.array(survivals, np.float64)

    def adopt(self, grown: Grown) -> None:
        """Add the nodes that the native code grew from `leaves`."""
        self._frontier = grown.leaves
        children = zip(grown.children, grown.survivals, strict=True)
        columns = (grown.expanded, grown.num_children, grown.token_ids, grown.scores)
        for index, count, token_ids, scores in zip(*columns, strict=True):
            node = self.nodes[index]
            if index:
                self.assign_slots([node])
            node.ranking = Ranking(token_ids, scores)
            for token, survival in islice(children, count):
                self._append(token, survival, node)

    def _append(self, token: int, survival: float, parent: Node) -> None:
        node = parent.children[token] = Node(token, survival, parent, len(self.nodes))
        self.nodes.append(node)

    def path_tokens(self, node: Node) -> list[int]:
        """The tokens of the path from the root (excluded) to `node` (included)."""
        tokens: list[int] = []
        while node is not self.root:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]

    def walk(self, token_ids: Sequence[int]) -> list[Node]:
        """The nodes on the path of `token_ids` from the root, as far as the tree contains it."""
        path, children = list[Node](), self.root.children
        for token in token_ids:
            if token not in children:
                break
            path.append(children[token])
            children = path[-1].children
        return path

    def reroot(self, root: Node) -> list[int]:
        """Make the expanded node `root` the new root; keep only its descendants with a survival.

        Returns the old slots of the kept nodes, ascending.  Nodes and slots keep their order;
        survivals become conditional on reaching the new root.
        """
        kept = {root: 0}  # and their new places
        for node in self.nodes[root.index + 1 :]:
            if node.parent in kept and node.survival > 0.0:
                kept[node] = len(kept)
        leaves = [self.nodes[index] for _, index in self._frontier]
        expanded = [node for node in self.expanded if node in kept and node is not root]
        kept_slots = [node.slot for node in expanded]
        share, depth = root.survival, root.depth
        self.root, self.nodes, self.expanded = root, list(kept), []
        for node, node.index in kept.items():
            node.survival = min(node.survival / share, 1.0)
            node.depth -= depth
            node.children = {token: each for token, each in node.children.items() if each in kept}
        root.parent, root.slot = root, -1
        self.assign_slots(expanded)
        self._frontier = [(-leaf.survival, leaf.index) for leaf in leaves if leaf in kept]
        heapq.heapify(self._frontier)
        return kept_slots

    def of(self, chosen: Sequence[Node]) -> tuple[TokenTree, FloatArray]:
        """The tree of these nodes, ascending, and their survivals."""
        places = {node: place for place, node in enumerate(chosen)}
        tree = TokenTree.of(
            [node.token for node in chosen], [places.get(node.parent, -1) for node in chosen]
        )
        return tree, np.array([node.survival for node in chosen], dtype=np.float32)

    def best_nodes(self, max_nodes: int, min_survival: float) -> list[Node]:
        """The at most `max_nodes` most likely nodes, leaves included, ascending.

        A child is never more likely than its parent and comes after it, so any prefix of a stable
        order by survival contains the parents of its nodes.
        """
        nodes = [node for node in self.nodes[1:] if node.survival >= min_survival]
        best = sorted(nodes, key=attrgetter("survival"), reverse=True)[:max_nodes]
        return sorted(best, key=attrgetter("index"))
