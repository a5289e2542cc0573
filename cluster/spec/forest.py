"""Many trees in one set of arrays, so that one NumPy call serves a whole batch.

A step's trees are small, and each NumPy call costs about a microsecond: tree by tree, the calls
would cost more than the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_FLOATS, EMPTY_TOKENS, FloatArray, TokenArray, TokenTree
from cluster.records import record

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


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

    def __len__(self) -> int:
        """Number of trees, empty ones included."""
        return len(self.starts) - 1

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


def concatenated(arrays: Sequence[FloatArray]) -> FloatArray:
    """Return the values of several trees end to end, float32[n]; empty for no trees."""
    return np.concatenate(arrays) if arrays else EMPTY_FLOATS


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
