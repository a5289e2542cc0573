"""The growing tree of a draft model: expanded nodes, which have KV, and leaves, which do not yet.

A tree has a few hundred nodes and changes by a few at a time; lists are faster than arrays there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray, TokenTree
from cluster.draft.candidates import Ranking
from cluster.engine.cpu.growth import Grown

ROOT = 0
# How much of its parent's survival a node is taken to keep.  EAGLE-3 on SmolLM2, steps of 8 nodes:
# 0.5, 0.35 and 0.25 take 2.8, 2.5 and 2.4 passes per step, and expanding whatever is likely takes
# 3.5, all for the same tokens per step.
KEPT_SHARE = 0.35


class LiveTree:
    """A token tree; node 0 is the root, the last committed token, and parents precede children.

    An *expanded* node has KV and a ranking; the root is always expanded.  Every other expanded node
    has a *slot*: its index in the engine's tree, assigned in the order of expansion.  A leaf has no
    KV, ranking or slot.  A *graft* is a node of another drafter's tree, evaluated in one pass with
    those above it: its survival is 0 until its parent has a ranking, and stays so if it is no
    candidate.
    """

    def __init__(self) -> None:
        self.tokens = [-1]
        self.parents = [-1]
        self.survivals = [1.0]
        self.depths = [0]
        self.slots = [-1]
        self.rankings: list[Ranking | None] = [None]
        self.slot_nodes: list[int] = []  # slot -> node
        self._children: list[Sequence[int]] = [()]
        self._frontier: list[tuple[float, int]] = []  # heap of (-survival, leaf)

    def __len__(self) -> int:
        """The number of nodes below the root."""
        return len(self.tokens) - 1

    @property
    def num_slots(self) -> int:
        return len(self.slot_nodes)

    def best_leaf_survival(self) -> float:
        """The survival of the leaf to expand next, 0 if there is none."""
        return -self._frontier[0][0] if self._frontier else 0.0

    def best_survivals(self, count: int) -> list[float]:
        """Of the `count` likeliest nodes below the root, best first; of all if they are fewer."""
        return sorted(self.survivals[1:], reverse=True)[:count] if count else []

    def least_worth(self, num_wanted: int) -> float:
        """Leaves of a lower survival hardly have a child among the `num_wanted` likeliest nodes."""
        if len(self) < num_wanted:
            return 0.0
        return self.best_survivals(num_wanted)[-1] / KEPT_SHARE

    def pop_leaf(self) -> int:
        """Remove the most likely leaf from the frontier in order to expand it."""
        return heapq.heappop(self._frontier)[1]

    def assign_slots(self, leaves: Sequence[int]) -> None:
        """Give `leaves`, which are about to be evaluated, the engine's next slots."""
        for leaf in leaves:
            self.slots[leaf] = len(self.slot_nodes)
            self.slot_nodes.append(leaf)

    def engine_tree(self) -> TokenTree:
        """The nodes with slots, in slot order."""
        tokens, parents, slots = self.tokens, self.parents, self.slots
        nodes = self.slot_nodes
        return TokenTree.of(
            [tokens[node] for node in nodes], [slots[parents[node]] for node in nodes]
        )

    def expand(
        self, node: int, ranking: Ranking, children: Sequence[tuple[int, float]], *, grows: bool
    ) -> None:
        """Give `node` its ranking and its `children`, pairs of (token, survival).

        grows: whether the children may be expanded in turn.  A graft below it is the child of its
        token.
        """
        self.rankings[node] = ranking
        grafts = self.children(node)
        for token, survival in children:
            if token in grafts:
                self.survivals[grafts[token]] = survival
                continue
            child = self._append(token, node, survival)
            if grows:
                heapq.heappush(self._frontier, (-survival, child))

    def graft(self, tree: TokenTree) -> Sequence[int]:
        """Add the nodes of another drafter's tree to this one, which has none yet; returns them."""
        for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
            self._append(token, parent + 1, 0.0)
        grafts = range(1, len(self.tokens))
        self.assign_slots(grafts)
        return grafts

    def take(self, leaf: int) -> None:
        """Remove a leaf from the frontier, and give it the next slot."""
        self._frontier = [each for each in self._frontier if each[1] != leaf]
        heapq.heapify(self._frontier)
        self.assign_slots((leaf,))

    def leaves(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """The leaves to expand as native code takes them, and their survivals; see `Growing`."""
        tokens, slots, parents, depths = self.tokens, self.slots, self.parents, self.depths
        nodes = [node for _, node in self._frontier]
        columns = [
            nodes,
            [tokens[node] for node in nodes],
            [slots[parents[node]] for node in nodes],
            [depths[node] for node in nodes],
        ]
        survivals = [-cost for cost, _ in self._frontier]
        return np.array(columns, np.int32), np.array(survivals, np.float64)

    def adopt(self, grown: Grown) -> None:
        """Add the nodes that the native code grew from `leaves`."""
        self._frontier = grown.leaves
        first = len(self.tokens)
        self.tokens += grown.children
        self.survivals += grown.survivals
        num_new = len(grown.children)
        self.slots += [-1] * num_new
        self._children += [()] * num_new
        self.rankings += [None] * num_new
        columns = (grown.expanded, grown.num_children, grown.token_ids, grown.scores)
        for node, count, token_ids, scores in zip(*columns, strict=True):
            if node != ROOT:
                self.slots[node] = len(self.slot_nodes)
                self.slot_nodes.append(node)
            self.rankings[node] = Ranking(token_ids, scores)
            self._children[node] = range(first, first + count)
            self.parents += [node] * count
            self.depths += [self.depths[node] + 1] * count
            first += count

    def _append(self, token: int, parent: int, survival: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.survivals.append(survival)
        self.depths.append(self.depths[parent] + 1)
        self.slots.append(-1)
        self.rankings.append(None)
        self._children.append(())
        self._children[parent] = [*self._children[parent], len(self)]
        return len(self)

    def children(self, node: int) -> dict[int, int]:
        """The nodes below `node` by their tokens."""
        return {self.tokens[child]: child for child in self._children[node]}

    def path_tokens(self, node: int) -> list[int]:
        """The tokens of the path from the root (excluded) to `node` (included)."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        tokens.reverse()
        return tokens

    def walk(self, token_ids: Sequence[int]) -> list[int]:
        """The nodes on the path of `token_ids` from the root, as far as the tree contains it."""
        path: list[int] = []
        node = ROOT
        for token in token_ids:
            node = self.child(node, token)
            if node < 0:
                break
            path.append(node)
        return path

    def child(self, node: int, token: int) -> int:
        """The child of `node` with this token, -1 = none."""
        return self.children(node).get(token, -1)

    def reroot(self, root: int) -> list[int]:
        """Make the expanded node `root` the new root; keep only its descendants with a survival.

        Returns the old slots of the kept nodes, ascending.  Nodes and slots keep their order;
        survivals become conditional on reaching the new root.
        """
        places = {root: ROOT}
        for node in range(root + 1, len(self.tokens)):
            if self.parents[node] in places and self.survivals[node] > 0.0:
                places[node] = len(places)
        kept = list(places)
        kept_slots = [
            slot for slot, node in enumerate(self.slot_nodes) if node in places and node != root
        ]
        share, depth = self.survivals[root], self.depths[root]
        frontier = [places[leaf] for _, leaf in self._frontier if leaf in places]
        self.slot_nodes = [places[self.slot_nodes[slot]] for slot in kept_slots]
        self.tokens = [self.tokens[node] for node in kept]
        self.parents = [places.get(self.parents[node], -1) for node in kept]
        self.survivals = [min(self.survivals[node] / share, 1.0) for node in kept]
        self.depths = [self.depths[node] - depth for node in kept]
        self.rankings = [self.rankings[node] for node in kept]
        self._children = [
            [places[child] for child in self._children[node] if child in places] for node in kept
        ]
        self.slots = [-1] * len(kept)
        for slot, node in enumerate(self.slot_nodes):
            self.slots[node] = slot
        self._frontier = [(-self.survivals[leaf], leaf) for leaf in frontier]
        heapq.heapify(self._frontier)
        return kept_slots

    def of(self, chosen: Sequence[int]) -> tuple[TokenTree, FloatArray]:
        """The tree of these nodes, ascending, and their survivals."""
        places = {node: place for place, node in enumerate(chosen)}
        tree = TokenTree.of(
            [self.tokens[node] for node in chosen],
            [places.get(self.parents[node], -1) for node in chosen],
        )
        return tree, np.array([self.survivals[node] for node in chosen], dtype=np.float32)

    def best_nodes(self, max_nodes: int, min_survival: float) -> list[int]:
        """The at most `max_nodes` most likely nodes, leaves included, ascending.

        A child is never more likely than its parent and comes after it, so any prefix of a stable
        order by survival contains the parents of its nodes.
        """
        survivals = np.array(self.survivals)
        nodes = np.flatnonzero(survivals >= min_survival)[1:]  # without the root
        if len(nodes) > max_nodes:
            nodes = np.sort(nodes[np.argsort(-survivals[nodes], kind="stable")[:max_nodes]])
        chosen: list[int] = nodes.tolist()
        return chosen
