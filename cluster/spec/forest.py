"""Many trees as one set of arrays: what a whole batch needs, in the operations of one tree.

A step's trees are small, and NumPy takes a microsecond a call: tree by tree, the calls would cost
more than the work.  Each function here does for all trees what its namesake in `spec.tree` does
for one; the tests hold them to the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_FLOATS, EMPTY_TOKENS, FloatArray, TokenArray, TokenTree
from cluster.errors import ProtocolError
from cluster.records import record
from cluster.spec.tree import check_tree

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

# Up to so many nodes in all, a plain loop over them takes less time than the array operations.
_FEW = 64
# Claims smaller than this say nothing of what stands below them.
_MIN_REACHED = np.float32(1e-6)


@record(frozen=True, slots=True, eq=False)
class Forest:
    """Trees end to end; tree i has the nodes [starts[i], starts[i + 1]).

    token_ids: int32[n].  parents: int64[n], the parent's place in these arrays, -1 = continues the
    context of its tree.  owners: int64[n], each node's tree, ascending.  starts: int64[trees + 1].
    """

    token_ids: TokenArray
    parents: Indices
    owners: Indices
    starts: Indices

    def __len__(self) -> int:
        """How many trees there are, empty ones included."""
        return len(self.starts) - 1

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def keep(self, kept: Mask) -> Forest:
        """The nodes where kept, each with its parent or parentless; all trees stay, if empty."""
        places = kept.cumsum()
        below = self.parents[kept]
        parents = np.where((below >= 0) & kept[below], places[below] - 1, -1)
        starts = np.zeros(len(self.starts), dtype=np.int64)
        ends = self.starts[1:]
        starts[1:][ends > 0] = places[ends[ends > 0] - 1]
        return Forest(self.token_ids[kept], parents, self.owners[kept], starts)

    def span(self, index: int) -> slice:
        """Where the nodes of one tree are."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))

    def tree(self, index: int) -> TokenTree:
        """One of the trees."""
        nodes = self.span(index)
        parents = np.maximum(self.parents[nodes] - nodes.start, -1)
        return TokenTree(self.token_ids[nodes], parents.astype(np.int32))

    def split(self) -> list[TokenTree]:
        """The trees one by one, as views of two arrays."""
        local = np.maximum(self.parents - self.starts[self.owners], -1)
        tokens, parents = self.token_ids, local.astype(np.int32)
        bounds = self.starts.tolist()
        return [
            TokenTree(tokens[start:stop], parents[start:stop]) for start, stop in pairwise(bounds)
        ]


def join(trees: Sequence[TokenTree]) -> Forest:
    """`trees` end to end.  What their parents say is not looked at."""
    counts = [len(tree.token_ids) for tree in trees]
    starts = np.zeros(len(trees) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    owners = np.repeat(np.arange(len(trees)), counts)
    token_ids = np.concatenate([tree.token_ids for tree in trees] or [EMPTY_TOKENS])
    local = np.concatenate([tree.parents for tree in trees] or [EMPTY_TOKENS])
    parents = np.where(local < 0, local, local + starts[owners])
    return Forest(token_ids, parents, owners, starts)


def concatenated(arrays: Sequence[FloatArray]) -> FloatArray:
    """The values of several trees end to end, float32[n]; of none, none."""
    return np.concatenate(arrays) if arrays else EMPTY_FLOATS


def are_well_formed(trees: Sequence[TokenTree], vocab_size: int) -> bool:
    """Whether every one of `trees` would pass `tree.check_tree`."""
    if any(len(tree.token_ids) != len(tree.parents) for tree in trees):
        return False
    if sum(len(tree.token_ids) for tree in trees) <= _FEW:
        return all(map(partial(_is_well_formed, vocab_size=vocab_size), trees))
    forest = join(trees)
    parents, starts = forest.parents, forest.starts[forest.owners]
    is_placed = (parents == -1) | ((parents >= starts) & (parents < np.arange(len(parents))))
    if not is_placed.all():
        return False
    if forest.token_ids.min(initial=0) < 0 or forest.token_ids.max(initial=-1) >= vocab_size:
        return False
    edges = np.sort(_family(forest) * vocab_size + forest.token_ids)
    return not bool((edges[1:] == edges[:-1]).any())


def _is_well_formed(tree: TokenTree, vocab_size: int) -> bool:
    try:
        check_tree(tree, vocab_size)
    except ProtocolError:
        return False
    return True


def levels(parents: Indices) -> list[Indices]:
    """The nodes of depth 2, of depth 3 and so on, each ascending; int64[...].

    parents: int64[n] as in `Forest`.
    """
    depth = depths(parents)
    deepest = int(depth.max(initial=1))
    if deepest == 1:
        return []
    order = np.argsort(depth, kind="stable")
    bounds = np.cumsum(np.bincount(depth, minlength=deepest + 1)).tolist()
    return [order[bounds[level - 1] : bounds[level]] for level in range(2, deepest + 1)]


def depths(parents: Indices) -> npt.NDArray[np.int16]:
    """Distance of each node from its tree's last committed token; int16[n]."""
    found = np.ones(len(parents), dtype=np.int16)
    nodes = np.flatnonzero(parents >= 0)
    above = parents[nodes]
    while len(nodes):
        found[nodes] += 1
        above = parents[above]
        goes_on = above >= 0
        nodes, above = nodes[goes_on], above[goes_on]
    return found


def monotone(
    parents: Indices, survival: FloatArray, by_level: Sequence[Indices] | None = None
) -> FloatArray:
    """`survival` with every node clamped to its parent's value, NaN and negatives to 0.

    by_level: `levels(parents)` where it is known already.
    """
    if by_level is None and len(parents) <= _FEW:
        return np.array(_bounded(parents.tolist(), survival.tolist()), dtype=np.float32)
    bounded = np.where(survival > 0.0, np.minimum(survival, np.float32(1.0)), np.float32(0.0))
    for nodes in levels(parents) if by_level is None else by_level:
        bounded[nodes] = np.minimum(bounded[nodes], bounded[parents[nodes]])
    return bounded


def _bounded(parents: Sequence[int], survival: Sequence[float]) -> list[float]:
    """`monotone`, node by node."""
    found: list[float] = []
    for parent, value in zip(parents, survival, strict=True):
        bound = 1.0 if parent < 0 else found[parent]
        # False for what is no number.
        found.append(min(value, bound) if value > 0.0 else 0.0)
    return found


def path_products(forest: Forest, shares: Floats) -> Floats:
    """The product of `shares` over each node and its ancestors: float64[n]."""
    if forest.num_nodes <= _FEW:
        products: list[float] = []
        for parent, share in zip(forest.parents.tolist(), shares.tolist(), strict=True):
            products.append(share if parent < 0 else products[parent] * share)
        return np.array(products, dtype=np.float64)
    found = shares.copy()
    for nodes in levels(forest.parents):
        found[nodes] *= found[forest.parents[nodes]]
    return found


def sibling_shares(forest: Forest, conditionals: Floats) -> Floats:
    """Conditionals scaled down where siblings' sum exceeds 1: at most one of them is drawn."""
    family = _family(forest)
    totals = np.bincount(family, weights=conditionals, minlength=1)
    return conditionals / np.maximum(totals[family], 1.0)


def _family(forest: Forest) -> Indices:
    """The same number for siblings only: the parent, or one of its own for each context."""
    return np.where(forest.parents < 0, forest.num_nodes + forest.owners, forest.parents)


def walk(forest: Forest, committed: Sequence[TokenArray]) -> Indices:
    """Where `committed[i]` leads in tree i: int64[trees], -1 = nowhere yet, -2 = out of it."""
    lengths = np.array([len(tokens) for tokens in committed], dtype=np.int64)
    at = np.full(len(forest), -1, dtype=np.int64)
    if not lengths.any():
        return at
    if forest.num_nodes <= _FEW:
        return _walk_few(forest, committed)
    begins = np.cumsum(lengths) - lengths
    flat = np.concatenate(committed)
    for step in range(int(lengths.max())):
        moving = np.flatnonzero(step < lengths)
        wanted = np.full(len(forest), -1, dtype=np.int32)
        wanted[moving] = flat[begins[moving] + step]
        is_next = forest.parents == at[forest.owners]
        is_next &= forest.token_ids == wanted[forest.owners]
        nodes = np.flatnonzero(is_next)
        at[moving] = -2
        at[forest.owners[nodes]] = nodes
    return at


def _walk_few(forest: Forest, committed: Sequence[TokenArray]) -> Indices:
    """`walk`, node by node."""
    # The children of contexts are told apart by their trees, which are numbered below -1.
    rows = zip(
        forest.parents.tolist(), forest.owners.tolist(), forest.token_ids.tolist(), strict=True
    )
    edges = {
        (parent if parent >= 0 else -2 - owner, token): node
        for node, (parent, owner, token) in enumerate(rows)
    }
    at: list[int] = []
    for index, tokens in enumerate(committed):
        node: int | None = -2 - index
        for token in tokens.tolist():
            node = edges.get((node, token))
            if node is None:
                break
        at.append(-2 if node is None else max(node, -1))
    return np.array(at, dtype=np.int64)


def below(forest: Forest, roots: Indices) -> Mask:
    """Which nodes descend from their tree's root: bool[n].

    roots: int64[trees], -1 = the context, whose descendants are all, -2 = nothing.
    """
    root = roots[forest.owners]
    if forest.num_nodes <= _FEW:
        is_below: list[bool] = []
        for parent, of_tree in zip(forest.parents.tolist(), root.tolist(), strict=True):
            # A node of the context has parent -1, which is also the root of all its nodes.
            is_below.append(parent == of_tree or (parent >= 0 and is_below[parent]))
        return np.array(is_below, dtype=np.bool_)
    found: Mask = root == -1
    nodes = np.flatnonzero(~found & (root >= 0))
    root, above = root[nodes], forest.parents[nodes]
    while len(nodes):
        has_come = above == root
        found[nodes[has_come]] = True
        goes_on = ~has_come & (above >= 0)
        nodes, root, above = nodes[goes_on], root[goes_on], forest.parents[above[goes_on]]
    return found


def conditioned(values: FloatArray, forest: Forest, roots: Indices, kept: Mask) -> FloatArray:
    """Survivals of the nodes kept, given that their tree's root was reached: float32[kept].

    Trees that have not moved (root -1) keep theirs.
    """
    reached = np.ones(len(roots), dtype=np.float32)
    has_moved = roots >= 0
    reached[has_moved] = np.maximum(values[roots[has_moved]], _MIN_REACHED)
    rest: FloatArray = np.minimum(values[kept] / reached[forest.owners[kept]], np.float32(1.0))
    return rest


@record(frozen=True, slots=True, eq=False)
class MergedForest:
    """The union of each group's trees.

    forest: a tree per group.  survival: float32[m].  places: int64[n], where each node of the
    merged trees has gone.
    """

    forest: Forest
    survival: FloatArray
    places: Indices


def merge(
    forest: Forest, groups: Indices, num_groups: int, survival: FloatArray, shares: Floats
) -> MergedForest:
    """The trie unions of the trees of each group; as `tree.merge` of each, with these shares.

    groups: int64[trees], ascending.  shares: float64[trees], summing to 1 within a group.
    """
    if forest.num_nodes <= _FEW:
        return _merge_few(forest, groups, num_groups, survival, shares)
    num_nodes, group = forest.num_nodes, groups[forest.owners]
    by_level = levels(forest.parents)
    first = np.flatnonzero(forest.parents < 0)
    above = num_nodes + group  # of the first level; deeper ones are filled in as they are reached
    same = np.arange(num_nodes)  # the first node of the same path
    base = int(forest.token_ids.max(initial=0)) + 1
    for nodes in (first, *by_level):
        if nodes is not first:
            above[nodes] = same[forest.parents[nodes]]
        edges = above[nodes] * base + forest.token_ids[nodes]
        order = np.argsort(edges, kind="stable")
        ranked = edges[order]
        is_new = np.ones(len(nodes), dtype=np.bool_)
        is_new[1:] = ranked[1:] != ranked[:-1]
        leaders = nodes[order[is_new]]
        same[nodes[order]] = leaders[np.cumsum(is_new) - 1]
    is_leader = same == np.arange(num_nodes)
    places = (np.cumsum(is_leader) - 1)[same]
    owners = group[is_leader]
    starts = np.searchsorted(owners, np.arange(num_groups + 1))
    above = forest.parents[is_leader]
    parents = np.where(above < 0, -1, places[above])
    merged = Forest(forest.token_ids[is_leader], parents, owners, starts)
    claims = shares[forest.owners] * monotone(forest.parents, survival, by_level)
    values = np.bincount(places, weights=claims, minlength=merged.num_nodes).astype(np.float32)
    return MergedForest(merged, monotone(parents, values), places)


def _merge_few(
    forest: Forest, groups: Indices, num_groups: int, survival: FloatArray, shares: Floats
) -> MergedForest:
    """`merge`, node by node."""
    above = forest.parents.tolist()
    group_of, share_of = groups.tolist(), shares.tolist()
    rows = zip(
        above, forest.owners.tolist(), forest.token_ids.tolist(),
        _bounded(above, survival.tolist()), strict=True,
    )  # fmt: skip
    edges: dict[tuple[int, int], int] = {}
    places: list[int] = []
    leaders: list[int] = []
    parents: list[int] = []
    claims: list[float] = []
    for node, (parent, owner, token, value) in enumerate(rows):
        # The contexts of groups are numbered below 0.
        place = places[parent] if parent >= 0 else -1 - group_of[owner]
        merged = edges.setdefault((place, token), len(leaders))
        if merged == len(leaders):
            leaders.append(node)
            parents.append(max(place, -1))
            claims.append(0.0)
        places.append(merged)
        claims[merged] += share_of[owner] * value
    owners = groups[forest.owners[leaders]]
    starts = np.searchsorted(owners, np.arange(num_groups + 1))
    merged_parents = np.array(parents, dtype=np.int64)
    tree = Forest(forest.token_ids[leaders], merged_parents, owners, starts)
    values = monotone(merged_parents, np.array(claims, dtype=np.float32))
    return MergedForest(tree, values, np.array(places, dtype=np.int64))


def ranked(survival: FloatArray, owners: Indices, starts: Indices) -> tuple[Indices, Indices]:
    """The nodes tree by tree, each tree's best first: (nodes, ranks), int64[n] each.

    NaN and negatives count as 0.  Ties go to the lower index, which is never the child.
    """
    values = np.where(survival > 0.0, survival, 0.0).astype(np.float32, copy=False)
    # Bit patterns of floats that are not negative are in the order of their values.
    keys = (owners << 32) - values.view(np.int32)
    order = keys.argsort(kind="stable")
    return order, np.arange(len(order)) - starts[owners]
