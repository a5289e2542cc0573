"""Trees, and many at once, against brute force over their paths; the walk over a target's draws by
examples."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import EMPTY_FLOATS, TokenTree, token_array
from cluster.spec.tree import (
    ancestor_mask,
    children,
    depths,
    join,
    monotone,
    prune,
    ranked,
    reroot,
    walk,
    walk_draws,
)
from cluster.spec.tree_check import check_tree
from tests.support.spec.trees import path_to, paths, token_trees


def survival_of(tree: TokenTree, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).random(len(tree)).astype(np.float32)
    return monotone(tree.parents, values)


@given(token_trees())
def test_depths_masks_and_children_follow_from_paths(tree: TokenTree):
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
def test_a_walk_finds_the_longest_known_prefix(tree: TokenTree, tokens: list[int]):
    known = {(): -1} | {path: node for node, path in enumerate(paths(tree))}
    matched = max(k for k in range(len(tokens) + 1) if tuple(tokens[:k]) in known)

    assert walk(tree, tokens) == path_to(tree.parents, known[tuple(tokens[:matched])])


@given(token_trees(max_nodes=9), st.integers(0, 10))
def test_pruning_keeps_the_best_prefix_closed_nodes(tree: TokenTree, max_nodes: int):
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


def test_pruning_keeps_parents_where_claims_grow_along_a_path():
    tree = TokenTree.of([1, 2, 3], [-1, -1, 1])

    _, _, kept = prune(tree, np.array([0.5, 0.4, 0.9], np.float32), 2)

    assert kept.tolist() == [0, 1]


def test_impossible_survivals_count_as_zero_or_one():
    values = np.array([np.nan, -1.0, 7.0, np.inf], np.float32)

    assert monotone(np.full(4, -1, np.int32), values).tolist() == [0.0, 0.0, 1.0, 1.0]


@given(token_trees(), st.lists(st.integers(0, 5), max_size=4))
def test_rerooting_keeps_exactly_the_continuations(tree: TokenTree, committed: list[int]):
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


many_trees = st.lists(token_trees(), max_size=5)


def same(ours: TokenTree, theirs: TokenTree) -> bool:
    return (
        ours.token_ids.tolist() == theirs.token_ids.tolist()
        and ours.parents.tolist() == theirs.parents.tolist()
    )


@given(many_trees)
def test_trees_come_out_as_they_went_in(trees: list[TokenTree]):
    split = join(trees).split()

    assert len(split) == len(trees)
    assert all(map(same, split, trees))
    assert all(tree.parents.dtype == np.int32 for tree in split)


@given(many_trees, st.integers(0, 2**32 - 1))
def test_the_best_nodes_are_those_of_each_tree(trees: list[TokenTree], seed: int):
    generator = np.random.default_rng(seed)
    # Some are equal, some are no probabilities, and some exceed their parent's.
    choices = np.array([0.0, 0.25, 0.5, 0.5, 0.9, 1.0, -0.5, np.nan], np.float32)
    claims = [monotone(tree.parents, generator.choice(choices, len(tree))) for tree in trees]
    forest = join(trees)

    survival = np.concatenate((EMPTY_FLOATS, *claims))
    nodes, ranks = ranked(survival, forest.owners, forest.starts)

    for cap in (0, 1, 3, 100):
        kept = np.zeros(forest.num_nodes, np.bool_)
        kept[nodes[ranks < cap]] = True
        expected = [prune(*each, cap)[0] for each in zip(trees, claims, strict=True)]
        assert all(map(same, forest.keep(kept).split(), expected))


#   0: a(5) - 2: c(7) - 4: e(9)
#   1: b(6) - 3: d(7)
TREE = TokenTree.of([5, 6, 7, 7, 9], [-1, -1, 0, 1, 2])


@pytest.mark.parametrize(
    ("draws", "path", "token_ids"),
    [
        ([8, 7, 7, 9, 0, 0], [], [8]),  # the root draws what no child carries
        ([5, 7, 0, 9, 0, 1], [0, 2, 4], [5, 7, 9, 1]),  # to a leaf, and one more
        ([5, 6, 7, 9, 0, 1], [0], [5, 6]),  # node 2 has the token that node 1 drew, not its own
        ([6, 7, 7, 9, 3, 1], [1, 3], [6, 7, 3]),  # the second branch
        ([5, 7, 0, 8, 0, 1], [0, 2], [5, 7, 8]),
    ],
)
def test_the_walk_goes_on_from_the_child_that_carries_the_draw(
    draws: list[int], path: list[int], token_ids: list[int]
):
    nodes, emitted = walk_draws(TREE, token_array(draws))
    assert (nodes.tolist(), emitted.tolist()) == (path, token_ids)
    assert nodes.dtype == emitted.dtype == np.int32
