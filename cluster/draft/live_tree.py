"""The growing tree of a draft model: expanded nodes, which have KV, and leaves, which do not yet.

A tree has a few hundred nodes and changes by a few at a time; lists are faster than arrays there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence

import numpy as np

from cluster.core import FloatArray, TokenTree
from cluster.draft.candidates import Ranking
from cluster.engine.cpu.growth import Grown, Leaves

ROOT = 0
# In place of the parent of a graft that is no child.
_DROPPED = -2
# How much of its parent's survival a node is taken to keep.  EAGLE-3 on SmolLM2, steps of 8 nodes:
# 0.5, 0.35 and 0.25 take 2.8, 2.5 and 2.4 passes per step, and expanding whatever is likely takes
# 3.5, all for the same tokens per step.
KEPT_SHARE = 0.35


class LiveTree:
    """A token tree; node 0 is the root, the last committed token, and parents precede children.

    An *expanded* node has KV and a ranking; the root is always expanded.  Every other expanded node
    has a *slot*: its index in the engine's tree, assigned in the order of expansion.  A leaf has no
    KV, ranking or slot.  A *graft* is a node that another drafter expects below one that is being
    expanded with it: it has no survival, and is nobody's child, before that one has a ranking.
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
        self._grafts: dict[int, list[int]] = {}  # node -> grafts below it
        self.has_dropped = False  # grafts, which `reroot` removes
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

        grows: whether the children may be expanded in turn.  Grafts below it that are no children
        are dropped, with all below them.
        """
        self.rankings[node] = ranking
        grafts = {self.tokens[graft]: graft for graft in self._grafts.pop(node, ())}
        found: list[int] = []
        for token, survival in children:
            if token in grafts:
                found.append(grafts.pop(token))
                self.survivals[found[-1]] = survival
                continue
            found.append(self._append(token, node, survival))
            if grows:
                heapq.heappush(self._frontier, (-survival, found[-1]))
        self._children[node] = found
        self._drop(list(grafts.values()))

    def graft(self, tree: TokenTree, share_of: Callable[[int, int], float]) -> list[int]:
        """Add another drafter's nodes; return those that are to be expanded, parents first.

        share_of: of an expanded node and a token, the probability that the node's ranking gives it.
        Where that is 0, the token is left out, with all below it.
        """
        places = self._places(tree, lambda above, token: self._grafted(above, token, share_of))
        wanted = {each for each in places if each > ROOT and self.rankings[each] is None}
        self.take(wanted)
        return sorted(wanted)

    def take(self, leaves: Collection[int]) -> None:
        """Remove leaves from the frontier in order to expand them."""
        self._frontier = [each for each in self._frontier if each[1] not in leaves]
        heapq.heapify(self._frontier)

    def _grafted(self, above: int, token: int, share_of: Callable[[int, int], float]) -> int:
        if self.rankings[above] is None:
            self._grafts.setdefault(above, []).append(self._append(token, above, 0.0))
            return len(self)
        share = share_of(above, token)
        if share <= 0.0:
            return -1
        place = self._append(token, above, self.survivals[above] * share)
        self._children[above] = [*self._children[above], place]
        return place

    def grafts_below(self, node: int) -> Sequence[int]:
        """The tokens of the grafts that wait for the node's ranking."""
        return [self.tokens[graft] for graft in self._grafts.get(node, ())]

    def _drop(self, grafts: list[int]) -> None:
        for graft in grafts:
            self.has_dropped = True
            self.parents[graft] = _DROPPED
            self._drop(self._grafts.pop(graft, []))

    def num_held(self, tree: TokenTree) -> int:
        """The number of nodes of another tree from the same root that this one has."""
        return sum(place >= 0 for place in self._places(tree, lambda above, token: -1))

    def _places(self, tree: TokenTree, missing: Callable[[int, int], int]) -> list[int]:
        """This tree's node for each of another one's, -1 = none.  missing: is called with its
        parent here and its token for a node that is not here."""
        places: list[int] = []
        for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
            above = ROOT if parent < 0 else places[parent]
            place = self.child(above, token) if above >= 0 else -1
            places.append(missing(above, token) if place < 0 <= above else place)
        return places

    def is_dropped(self, node: int) -> bool:
        return self.parents[node] == _DROPPED

    def leaves(self) -> Leaves:
        """The leaves to expand, in the native code's form."""
        tokens, slots, parents, depths = self.tokens, self.slots, self.parents, self.depths
        nodes = [node for _, node in self._frontier]
        return Leaves(
            self._frontier,
            [tokens[node] for node in nodes],
            [slots[parents[node]] for node in nodes],
            [depths[node] for node in nodes],
        )

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
        return len(self)

    def child_tokens(self, node: int) -> list[int]:
        """The tokens of a node's children, in their order."""
        return [self.tokens[child] for child in self._children[node]]

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
        tokens = self.tokens
        return next((child for child in self._children[node] if tokens[child] == token), -1)

    def reroot(self, root: int) -> list[int]:
        """Make the expanded node `root` the new root; keep only its descendants that were not
        dropped.

        Returns the old slots of the kept nodes, ascending.  Nodes and slots keep their order;
        survivals become conditional on reaching the new root.
        """
        self.has_dropped = False
        places = {root: ROOT}
        for node in range(root + 1, len(self.tokens)):
            if self.parents[node] in places:
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
        self._children = [[places[child] for child in self._children[node]] for node in kept]
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
