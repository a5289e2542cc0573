"""Trees against brute force over their paths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import TokenTree
from cluster.spec.tree import (
    ancestor_mask,
    children,
    depths,
    monotone,
    prune,
    reroot,
    walk,
)
from cluster.spec.tree_check import check_tree
from tests.support.spec.trees import path_to, paths, token_trees


def survival_of(tree: TokenTree, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).random(len(tree)).astype(np.float32)
    return monotone(tree.parents, values)


@given(token_trees())
def test_depths_masks_and_children_follow_from_paths(tree: TokenTree) -> None:
    mask = ancestor_mask(tree.parents)
    below = children(tree.parents)
    for node in range(len(tree)):
        path = path_to(tree.parents, node)
        assert path[-1] == node
        assert depths(tree.parents)[node] == len(path)
        assert np.flatnonzero(mask[node]).tolist() == sorted(path)
        assert node in below[tree.parents[node] + 1]
    assert sum(len(nodes) for nodes in below) == len(tree)


@given(token_trees(), st.lists(st.integers(0, 5), max_size=6))
def test_a_walk_finds_the_longest_known_prefix(tree: TokenTree, tokens: list[int]) -> None:
    known = {(): -1} | {path: node for node, path in enumerate(paths(tree))}
    matched = max(k for k in range(len(tokens) + 1) if tuple(tokens[:k]) in known)

    assert walk(tree, tokens) == path_to(tree.parents, known[tuple(tokens[:matched])])


@given(token_trees(max_nodes=9), st.integers(0, 10))
def test_pruning_keeps_the_best_prefix_closed_nodes(tree: TokenTree, max_nodes: int) -> None:
    survival = survival_of(tree, 7)

    pruned, values, kept = prune(tree, survival, max_nodes)

    assert len(pruned) == min(len(tree), max_nodes)
    check_tree(pruned, 6)
    everything = paths(tree)
    assert paths(pruned) == [everything[node] for node in kept]
    assert values.tolist() == survival[kept].tolist()
    closed = [
        subset
        for subset in itertools.combinations(range(len(tree)), len(kept))
        if all(tree.parents[i] in (-1, *subset) for i in subset)
    ]
    best = max(sum(survival[list(subset)].tolist()) for subset in closed)
    assert float(survival[kept].sum()) == pytest.approx(best, rel=1e-5)


def test_pruning_keeps_parents_where_claims_grow_along_a_path() -> None:
    tree = TokenTree.of([1, 2, 3], [-1, -1, 1])

    _, _, kept = prune(tree, np.array([0.5, 0.4, 0.9], np.float32), 2)

    assert kept.tolist() == [0, 1]


def test_impossible_survivals_count_as_zero_or_one() -> None:
    values = np.array([np.nan, -1.0, 7.0, np.inf], np.float32)

    assert monotone(np.full(4, -1, np.int32), values).tolist() == [0.0, 0.0, 1.0, 1.0]


@given(token_trees(), st.lists(st.integers(0, 5), max_size=4))
def test_rerooting_keeps_exactly_the_continuations(tree: TokenTree, committed: list[int]) -> None:
    survival = survival_of(tree, 3)

    result = reroot(tree, committed, survival)

    prefix = tuple(committed)
    everything = paths(tree)
    assert (result.node >= -1) == (prefix == () or prefix in everything)
    below = [p for p in everything if len(p) > len(prefix) and p[: len(prefix)] == prefix]
    assert paths(result.tree) == [p[len(prefix) :] for p in below]
    if result.node >= 0:
        assert everything[result.node] == prefix
        kept = [everything.index(path) for path in below]
        expected = survival[kept] / survival[result.node]
        np.testing.assert_allclose(result.survival, expected, rtol=1e-5)
