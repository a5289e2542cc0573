"""A drafting LM's trees, grown for several passes in one native call: see grow.cpp.

The same as passes of engine steps between which a drafter ranks candidates and chooses leaves; what
is saved is the way around a small model's pass, which takes longer than the pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Indices
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import TokenTree
from cluster.engine.cpu.causal_lm import GrowingTree, GrowthRules, NativeForward
from cluster.engine.draw.native import RankedDraw
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.memory.sequence import Sequence
from cluster.engine.work import Output, Work
from cluster.records import record


@dataclass(slots=True, eq=False)
class Growing:
    """A request's tree before a call, and the settings of its growth.

    work: the text, and the expanded nodes in the order of their slots, which are all cached; with a
    delta there is no tree yet, and its last token is the root.
    leaves: those that wait to be expanded, in heap order: int32[4, leaves], node, token, its
    parent's slot (-1 = the root) and depth.  leaf_survivals: theirs.
    num_nodes: the root, expanded nodes and leaves.  max_slots: nodes that may have one.
    num_wanted: only leaves that may have a child among so many of the likeliest nodes are expanded;
    0 = all.  best_survivals: of these nodes, as far as they are there.
    draw: of the token after the root.  tau, coverage: see `cluster.draft.candidates`.
    stop_token_ids end the text from output position min_tokens on, as its length does at
    max_tokens.
    """

    work: Work
    leaves: npt.NDArray[np.int32]
    leaf_survivals: npt.NDArray[np.float64]
    num_nodes: int
    max_slots: int
    num_wanted: int
    best_survivals: Indices[float]
    draw: RankedDraw
    tau: float
    coverage: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: Indices[int]


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


class TreeTexts(Protocol):
    """The texts behind which trees grow, and their pages."""

    def opened(self, work: Work, max_slots: int, /) -> Sequence | Output | None:
        """The work's sequence with room for so many nodes; an Output with have_len where the cache
        lacks what the tree stands on, None where there are too few pages."""

    def written(self, sequence: Sequence, work: Work, tree: TokenTree, /) -> None:
        """Take note of the tree that a sequence has behind the work's text."""


class TreeGrower:
    """Grows trees of the requests of one engine."""

    def __init__(
        self, forward: NativeForward, cache: KVCache, max_context_len: int, texts: TreeTexts
    ) -> None:
        """cache: whose first layer is the model's."""
        self._forward = forward
        self._cache = cache
        self._max_context_len = max_context_len
        self._texts = texts
        self._kernels = forward.kernels
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._interrupted = ctypes.c_int32(0)

    @property
    def max_candidates(self) -> int:
        return self._kernels.max_ranked

    def interrupt(self) -> None:
        """End the call under way, or else the next one, after a pass; from any thread."""
        self._interrupted.value = 1

    def resume(self) -> None:
        """Forget an interruption: the next call goes on to its bounds."""
        self._interrupted.value = 0

    def grow(self, trees: Indices[Growing], rules: GrowthRules) -> list[Output | Grown | None]:
        """Make passes until a bound of the rules, an interruption, or no leaf is left to expand.

        As works for the same nodes, whose logits the caller ranks; none of the requests has a
        pending work.  For what is no Grown see `TreeTexts`; a work may wait for pages.
        """
        self._cache.settle()
        group = self._cache.group_of[0]  # of all the model's layers, where they run natively
        opened = [self._texts.opened(tree.work, tree.max_slots) for tree in trees]
        states = [
            _State(tree, each, group, rules) if isinstance(each, Sequence) else each
            for tree, each in zip(trees, opened, strict=True)
        ]
        self._run([each for each in states if isinstance(each, _State)], rules)
        answers: list[Output | Grown | None] = []
        for each in states:
            if not isinstance(each, _State):
                answers.append(each)
                continue
            grown = each.grown()
            self._texts.written(each.sequence, each.growing.work, grown.tree)
            answers.append(grown)
        return answers

    def _run(self, states: Indices[_State], rules: GrowthRules) -> None:
        if not states:
            return
        trees = [each.growing for each in states]
        end = max(tree.work.context_len + tree.max_slots + 1 for tree in trees)
        limit = self._max_context_len
        model = self._forward.growing_model(min(end, limit), limit)
        num_rows = rules.max_rows + sum(len(tree.work.delta) for tree in trees)
        library, address = self._kernels.library, ctypes.byref(model)
        size = library.growth_scratch(address, num_rows)
        if size > len(self._scratch):
            self._scratch = torch.empty(size, dtype=torch.float32)
        rules.interrupted = ctypes.addressof(self._interrupted)
        rules.scratch = self._scratch.data_ptr()
        pointers = (ctypes.c_void_p * len(states))(*(ctypes.addressof(s.tree) for s in states))
        library.grow_trees(
            address, ctypes.byref(rules), pointers, len(states), self._kernels.num_threads
        )
        self.resume()


class _State:
    """One tree's arrays during a call."""

    def __init__(
        self, growing: Growing, sequence: Sequence, group: int, rules: GrowthRules
    ) -> None:
        self.growing, self.sequence = growing, sequence
        work, tree, cached_len = growing.work, growing.work.tree, sequence.cached_len
        num_slots, num_leaves = len(tree), growing.leaves.shape[1]
        most = max(growing.max_slots - num_slots, 0) + 1  # nodes that can be expanded here
        most_children = most * rules.num_children
        self._tree = np.empty((2, num_slots + most), np.int32)
        self._tree[0, :num_slots], self._tree[1, :num_slots] = tree.token_ids, tree.parents
        self._leaves = np.empty((4, num_leaves + most_children), np.int32)
        self._leaf_survivals = np.empty(num_leaves + most_children)
        self._leaves[:, :num_leaves] = growing.leaves
        self._leaf_survivals[:num_leaves] = growing.leaf_survivals
        self._expanded = np.empty((2, most), np.int32)
        self._children = np.empty(most_children, np.int32)
        self._survivals = np.empty(most_children)
        self._token_ids = np.empty((most, rules.num_candidates), np.int64)
        self._scores = np.empty((most, rules.num_candidates))
        self._stop_tokens = np.array(growing.stop_token_ids, np.int32)
        self._best = np.array(growing.best_survivals, np.float64)
        self._delta = np.ascontiguousarray(work.delta[cached_len - work.base_len :], np.int32)
        self._slots = sequence.tables[group].slots
        assert self._slots.flags.c_contiguous, "slots are a view of one array"
        self.tree = GrowingTree(
            growing.draw,
            growing.tau,
            growing.coverage,
            growing.max_tokens,
            growing.min_tokens,
            len(self._stop_tokens),
            self._stop_tokens.ctypes.data,
            self._slots.ctypes.data,
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
            *_rows(self._leaves),
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
        count, num_children = tree.num_expanded, tree.num_nodes - self.growing.num_nodes
        survivals, nodes = self._leaf_survivals[: tree.num_leaves], self._leaves[0]
        leaves = zip((-survivals).tolist(), nodes[: tree.num_leaves].tolist(), strict=True)
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
