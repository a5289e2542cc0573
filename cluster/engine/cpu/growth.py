"""A drafting LM's trees, grown for several passes in one native call: see grow.cpp.

The same as passes of engine steps between which a drafter ranks candidates and chooses leaves; what
is saved is the way around a small model's pass, which takes longer than the pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import TokenTree
from cluster.engine.cpu.causal_lm import NativeForward
from cluster.engine.cpu.structures import GrowingModel, GrowingTree, GrowthBounds
from cluster.engine.draw.native import RankedDraw
from cluster.engine.work import Work
from cluster.records import frozen, record


@frozen
class GrowthRules:
    """How trees grow, as in `LMOptions`.

    vocab_size: tokens below it are candidates.  kept_share: as `KEPT_SHARE` of
    `cluster.draft.live_tree`.  max_seconds: after so much of a call no pass begins.
    """

    num_candidates: int
    num_children: int
    width: int
    max_rows: int
    vocab_size: int
    min_survival: float
    kept_share: float
    max_seconds: float


@dataclass(slots=True, eq=False)
class Leaves:
    """Nodes that wait to be expanded, as a heap of (-survival, node); the other lists are parallel.

    parent_slots: -1 = the root.
    """

    heap: list[tuple[float, int]]
    token_ids: list[int]
    parent_slots: list[int]
    depths: list[int]


@dataclass(slots=True, eq=False)
class Growing:
    """A request's tree before a call, and the settings of its growth.

    work: the text, and the expanded nodes in the order of their slots, which are all cached; with a
    delta there is no tree yet, and its last token is the root.  leaves: see there.  num_nodes: the
    root, expanded nodes and leaves.  max_slots: nodes that may have one.
    num_wanted: only leaves that may have a child among so many of the likeliest nodes are expanded;
    0 = all.  best_survivals: of these nodes, as far as they are there.
    draw: of the token after the root.  tau, coverage: see `cluster.draft.sharpness`.
    stop_token_ids end the text from output position min_tokens on, as its length does at
    max_tokens.
    """

    work: Work
    leaves: Leaves
    num_nodes: int
    max_slots: int
    num_wanted: int
    best_survivals: Sequence[float]
    draw: RankedDraw
    tau: float
    coverage: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]


@record
class Grown:
    """The result of a call for one tree.

    expanded: nodes in the order of their slots, the root (0) first where it is among them.
    num_children: of each; their tokens and survivals stand side by side, and they are numbered on
    from Growing.num_nodes.  leaves: the new heap.  token_ids, scores: [expanded, candidates],
    the rankings, as `DrawKernels.rank` has them.  tree: now.
    """

    expanded: list[int]
    num_children: list[int]
    children: list[int]
    survivals: list[float]
    leaves: list[tuple[float, int]]
    token_ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    tree: TokenTree


class TreeGrower:
    """Grows trees of the requests of one engine."""

    def __init__(self, forward: NativeForward, max_context_len: int) -> None:
        self._forward = forward
        self._max_context_len = max_context_len
        self._kernels = forward.kernels
        self._model = GrowingModel()
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._rotations: torch.Tensor | None = None  # of which the model holds addresses
        self._end = 0  # positions that they are of
        self._interrupted = ctypes.c_int32(0)

    @property
    def max_candidates(self) -> int:
        return self._kernels.draws.max_ranked

    def interrupt(self) -> None:
        """End the call under way, or else the next one, after a pass; from any thread."""
        self._interrupted.value = 1

    def resume(self) -> None:
        """Forget an interruption: the next call goes on to its bounds."""
        self._interrupted.value = 0

    def grow(
        self,
        trees: Sequence[Growing],
        texts: Sequence[tuple[npt.NDArray[np.int64], int]],
        rules: GrowthRules,
    ) -> list[Grown]:
        """Make passes until a bound of the rules, an interruption, or no leaf is left to expand.

        texts: of each tree's sequence (slot by position, tokens with KV); positions for the delta
        and max_slots nodes have a slot.
        """
        end = max(tree.work.context_len + tree.max_slots + 1 for tree in trees)
        self._prepare(min(end, self._max_context_len))
        num_rows = rules.max_rows + sum(len(tree.work.delta) for tree in trees)
        size = self._kernels.growth_scratch(self._model, num_rows)
        if size > len(self._scratch):
            self._scratch = torch.empty(size, dtype=torch.float32)
        states = [
            _State(tree, slots, cached, rules)
            for tree, (slots, cached) in zip(trees, texts, strict=True)
        ]
        growth = GrowthBounds(
            *astuple(rules), ctypes.addressof(self._interrupted), self._scratch.data_ptr()
        )
        pointers = (ctypes.c_void_p * len(states))(*(ctypes.addressof(s.tree) for s in states))
        self._kernels.grow_trees(self._model, growth, pointers)
        self.resume()
        return [state.grown() for state in states]

    def _prepare(self, end: int) -> None:
        """The model with the rotations of positions below `end`."""
        if end > self._end:
            limit = self._max_context_len
            self._model, self._rotations = self._forward.growing_model(end, limit)
            self._end = self._rotations.shape[2]


class _State:
    """One tree's arrays during a call."""

    def __init__(
        self,
        growing: Growing,
        slots: npt.NDArray[np.int64],
        cached_len: int,
        rules: GrowthRules,
    ) -> None:
        self._growing = growing
        work, tree, leaves = growing.work, growing.work.tree, growing.leaves
        num_slots, num_leaves = len(tree), len(leaves.heap)
        most = max(growing.max_slots - num_slots, 0) + 1  # nodes that can be expanded here
        most_children = most * rules.num_children
        self._tree = np.empty((2, num_slots + most), np.int32)
        self._tree[0, :num_slots], self._tree[1, :num_slots] = tree.token_ids, tree.parents
        most_leaves = num_leaves + most_children
        ints = np.empty((4, most_leaves), np.int32)
        self._leaves, self._leaf_survivals = ints[0], np.empty(most_leaves)
        if num_leaves:
            ints[0, :num_leaves] = [node for _, node in leaves.heap]
            ints[1, :num_leaves] = leaves.token_ids
            ints[2, :num_leaves] = leaves.parent_slots
            ints[3, :num_leaves] = leaves.depths
            self._leaf_survivals[:num_leaves] = [-cost for cost, _ in leaves.heap]
        self._expanded = np.empty((2, most), np.int32)
        self._children = np.empty(most_children, np.int32)
        self._survivals = np.empty(most_children)
        self._token_ids = np.empty((most, rules.num_candidates), np.int64)
        self._scores = np.empty((most, rules.num_candidates))
        self._stop_tokens = np.array(growing.stop_token_ids, np.int32)
        self._best = np.array(growing.best_survivals, np.float64)
        self._delta = np.ascontiguousarray(work.delta[cached_len - work.base_len :], np.int32)
        self._slots = slots
        assert slots.flags.c_contiguous, "slots are a view of one array"
        self.tree = GrowingTree(
            growing.draw,
            growing.tau,
            growing.coverage,
            growing.max_tokens,
            growing.min_tokens,
            len(self._stop_tokens),
            self._stop_tokens.ctypes.data,
            slots.ctypes.data,
            self._delta.ctypes.data,
            cached_len,
            len(self._delta),
            growing.max_slots,
            num_slots,
            num_leaves,
            growing.num_nodes,
            0,
            growing.num_wanted,
            len(self._best),
            *_rows(self._tree),
            *_rows(ints),
            self._leaf_survivals.ctypes.data,
            self._best.ctypes.data,
            *_rows(self._expanded),
            self._children.ctypes.data,
            self._survivals.ctypes.data,
            self._token_ids.ctypes.data,
            self._scores.ctypes.data,
        )

    def grown(self) -> Grown:
        tree = self.tree
        count, num_children = tree.num_expanded, tree.num_nodes - self._growing.num_nodes
        survivals = self._leaf_survivals[: tree.num_leaves]
        leaves = zip((-survivals).tolist(), self._leaves[: tree.num_leaves].tolist(), strict=True)
        return Grown(
            self._expanded[0, :count].tolist(),
            self._expanded[1, :count].tolist(),
            self._children[:num_children].tolist(),
            self._survivals[:num_children].tolist(),
            list(leaves),
            self._token_ids[:count],
            self._scores[:count],
            TokenTree(*self._tree[:, : tree.num_slots].copy()),
        )


def _rows(arrays: npt.NDArray[np.int32]) -> list[int]:
    """The addresses of an array's rows."""
    first, stride = arrays.ctypes.data, arrays.strides[0]
    return [first + index * stride for index in range(len(arrays))]
