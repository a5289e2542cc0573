"""Token trees as two arrays: everything about a tree follows from `token_ids` and `parents`.

Trees on this path are small (a few dozen nodes), where plain loops over lists beat vectorised
NumPy: a merge of three trees of sixteen nodes is some fifty dictionary look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cluster.core import (
    EMPTY_FLOATS,
    EMPTY_TOKENS,
    EMPTY_TREE,
    FloatArray,
    TokenArray,
    TokenTree,
)
from cluster.records import record

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


def depths(parents: TokenArray | Indices) -> TokenArray:
    """Distance of each node from the last committed token: children of the context have 1.

    parents: int32[n], or int64[n] of a forest.  Returns int32[n].
    """
    found: list[int] = []
    for parent in parents.tolist():
        found.append(1 if parent < 0 else found[parent] + 1)
    return np.array(found, dtype=np.int32)


def ancestor_bits(parents: TokenArray) -> list[int]:
    """Return for each node the nodes it may attend to: bit j is set for itself and its ancestors.

    parents: int32[n], parents[i] < i, -1 for children of the context.  A node's depth is the number
    of its bits.  SpecInfer (Miao et al. 2024), section 4.2.
    """
    found: list[int] = []
    own = 1
    for parent in parents.tolist():
        found.append(own if parent < 0 else found[parent] | own)
        own <<= 1
    return found


def packed_bits(bits: Sequence[int], num_bytes: int) -> bytes:
    """Numbers of so many bytes each, one behind the other, the low byte first."""
    return b"".join([each.to_bytes(num_bytes, "little") for each in bits])


def ancestor_mask(parents: TokenArray) -> Mask:
    """Return `ancestor_bits` as bool[n, n]; n is at most a few hundred."""
    return mask_of_bits(ancestor_bits(parents), len(parents))


def mask_of_bits(bits: Sequence[int], num_nodes: int) -> Mask:
    """bool[len(bits), num_nodes]: the nodes whose bits are set."""
    num_bytes = -(-num_nodes // 8)
    packed = np.frombuffer(packed_bits(bits, num_bytes), np.uint8).reshape(len(bits), num_bytes)
    return np.unpackbits(packed, axis=1, count=num_nodes, bitorder="little").view(np.bool_)


def children(parents: TokenArray) -> list[list[int]]:
    """The children of every node, ascending: entry 0 of the context, entry i + 1 of node i."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents.tolist()):
        found[parent + 1].append(node)
    return found


def walk(tree: TokenTree, token_ids: Sequence[int] | TokenArray) -> list[int]:
    """Follow `token_ids` from the context as far as the tree goes; returns the nodes on the way."""
    path: list[int] = []
    node, num_tokens, tokens = -1, len(token_ids), tree.token_ids.tolist()
    # Parents stand before children, so one pass in order meets the nodes of the path in turn.
    for child, parent in enumerate(tree.parents.tolist()):
        if len(path) == num_tokens:
            break
        if parent == node and tokens[child] == token_ids[len(path)]:
            node = child
            path.append(child)
    return path


def monotone(parents: TokenArray, survival: FloatArray) -> FloatArray:
    """`survival` with every node clamped to its parent's value, NaN and negatives to 0."""
    bounded: list[float] = []
    for parent, value in zip(parents.tolist(), survival.tolist(), strict=True):
        limit = 1.0 if parent < 0 else bounded[parent]
        bounded.append(min(value, limit) if value > 0.0 else 0.0)
    return np.array(bounded, dtype=np.float32)


def prune(
    tree: TokenTree, survival: FloatArray, max_nodes: int
) -> tuple[TokenTree, FloatArray, TokenArray]:
    """Keep the prefix-closed part of at most `max_nodes` nodes with the greatest total survival.

    Returns (tree, survival, kept): kept is int32[m], the old indices, ascending.  Survival is made
    monotone first.  Then the nodes with the greatest values are prefix-closed, because ties go to
    the lower index and a child's index is never lower than its parent's.
    """
    bounded = monotone(tree.parents, survival)
    if len(tree) <= max_nodes:
        return tree, bounded, np.arange(len(tree), dtype=np.int32)
    order = np.argsort(-bounded, kind="stable")[: max(max_nodes, 0)]
    kept = np.sort(order).astype(np.int32)
    return subtree(tree, kept), bounded[kept], kept


def subtree(tree: TokenTree, kept: TokenArray) -> TokenTree:
    """The tree of the nodes `kept` (ascending, with each node's parent, or parentless)."""
    if len(kept) == 0:
        return EMPTY_TREE
    places = np.full(len(tree) + 1, -1, dtype=np.int32)  # the last entry serves parent -1
    places[kept] = np.arange(len(kept), dtype=np.int32)
    return TokenTree(tree.token_ids[kept], places[tree.parents[kept]])


@record
class RerootResult:
    """The rest of a tree after tokens were committed.

    node: the old node that is now the last committed token, -1 when nothing was committed, -2 when
    the tokens left the tree, of which nothing remains then.  tree: its descendants.  survival: that
    of the descendants, given that `node` was reached; empty when none was passed in.
    """

    node: int
    tree: TokenTree
    survival: FloatArray


def reroot(
    tree: TokenTree,
    committed: Sequence[int] | TokenArray,
    survival: FloatArray = EMPTY_FLOATS,
) -> RerootResult:
    """Move the root along `committed`: the subtree of the new root stays, everything else goes."""
    path = walk(tree, committed)
    if len(path) < len(committed):
        return RerootResult(-2, EMPTY_TREE, EMPTY_FLOATS)
    if not path:
        return RerootResult(-1, tree, survival)
    root = path[-1]
    kept = below(tree.parents, root)
    if len(survival):
        # The claims are conditional on the old root; condition them on the new one.
        reached_share = max(float(survival[root]), 1e-6)
        survival = np.minimum(survival[kept] / reached_share, 1.0).astype(np.float32)
    return RerootResult(root, subtree(tree, kept), survival)


def below(parents: TokenArray, root: int) -> TokenArray:
    """The descendants of a node, ascending: int32[m].  parents: int32[n]."""
    is_below = [False] * len(parents)
    for node, parent in enumerate(parents.tolist()):
        is_below[node] = parent == root or (parent >= 0 and is_below[parent])
    return np.flatnonzero(is_below).astype(np.int32)


# The law of acceptance: the target draws at every node, and the text is a walk over its draws.
#
# A draft token is accepted iff it *is* the token the target drew at its parent. The draws depend
# on the target, the path and the noise only, so the emitted text is the one plain decoding emits,
# whatever the tree: merged, pruned, stale or adversarial.


def walk_draws(tree: TokenTree, draws: TokenArray) -> tuple[TokenArray, TokenArray]:
    """Emit the draw at the root, and go on from the child that carries it, while there is one.

    draws: int[n + 1]; draws[0] is the target's draw after the context, draws[i + 1] after node i.
    Returns (path, token_ids): accepted nodes, root first, int32[m]; emitted tokens, int32[m + 1],
    of which the last is the target's own (bonus or recovered).
    """
    drawn = draws.tolist()
    tokens = tree.token_ids.tolist()
    node = -1
    path: list[int] = []
    # Parents stand before children, so one pass in order meets the nodes of the path in turn.
    for child, parent in enumerate(tree.parents.tolist()):
        if parent == node and tokens[child] == drawn[node + 1]:
            path.append(child)
            node = child
    emitted = [tokens[child] for child in path]
    emitted.append(drawn[node + 1])
    return np.array(path, dtype=np.int32), np.array(emitted, dtype=np.int32)


# Many trees in one set of arrays, so that one NumPy call serves a whole batch.
#
# A step's trees are small, and each NumPy call costs about a microsecond: tree by tree, the calls
# would cost more than the work.


@record
class Forest:
    """Trees end to end; tree i has the nodes [starts[i], starts[i + 1]).

    token_ids: int32[n].  parents: int64[n], the parent's place in these arrays, -1 = continues the
    context of its tree.  owners: int64[n], each node's tree, ascending.  starts: int64[trees + 1].
    """

    token_ids: TokenArray
    parents: Indices
    owners: Indices
    starts: Indices

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def keep(self, kept: Mask) -> Forest:
        """Return the forest of the nodes where `kept` is set.

        A kept node has no parent or a kept one.  Trees without kept nodes stay as empty trees.
        """
        places = kept.cumsum()
        below = self.parents[kept]
        parents = np.where((below >= 0) & kept[below], places[below] - 1, -1)
        starts = np.zeros(len(self.starts), dtype=np.int64)
        ends = self.starts[1:]
        starts[1:][ends > 0] = places[ends[ends > 0] - 1]
        return Forest(self.token_ids[kept], parents, self.owners[kept], starts)

    def span(self, index: int) -> slice:
        """Return the places of one tree's nodes."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))

    def split(self) -> list[TokenTree]:
        """Return the trees one by one, as views of two arrays."""
        local = np.maximum(self.parents - self.starts[self.owners], -1)
        tokens, parents = self.token_ids, local.astype(np.int32)
        bounds = self.starts.tolist()
        return [
            TokenTree(tokens[start:stop], parents[start:stop]) for start, stop in pairwise(bounds)
        ]


def join(trees: Sequence[TokenTree]) -> Forest:
    """Join `trees` end to end, without checks of their parents."""
    counts = [len(tree.token_ids) for tree in trees]
    starts = np.zeros(len(trees) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    owners = np.repeat(np.arange(len(trees)), counts)
    token_ids = np.concatenate([tree.token_ids for tree in trees] or [EMPTY_TOKENS])
    local = np.concatenate([tree.parents for tree in trees] or [EMPTY_TOKENS])
    parents = np.where(local < 0, local, local + starts[owners])
    return Forest(token_ids, parents, owners, starts)


def with_ancestors(parents: Indices, flags: Mask) -> Mask:
    """Return the nodes that have the flag and whose ancestors all have it; parents as above."""
    found: list[bool] = []
    for flag, parent in zip(flags.tolist(), parents.tolist(), strict=True):
        found.append(flag and (parent < 0 or found[parent]))
    return np.array(found, dtype=np.bool_)


def ranked(survival: FloatArray, owners: Indices, starts: Indices) -> tuple[Indices, Indices]:
    """Sort the nodes tree by tree, each tree's best first: (nodes, ranks), int64[n] each.

    NaN and negatives count as 0.  Ties go to the lower index, which is never the child.
    """
    values = np.where(survival > 0.0, survival, 0.0).astype(np.float32, copy=False)
    # Bit patterns of floats that are not negative are in the order of their values.
    keys = (owners << 32) - values.view(np.int32)
    order = keys.argsort(kind="stable")
    return order, np.arange(len(order)) - starts[owners]
