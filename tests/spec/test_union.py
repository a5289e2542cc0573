"""Trees are re-rooted, calibrated and merged alike in native code and in array operations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import FloatArray, TokenTree
from cluster.spec import union
from cluster.spec.forest import Forest
from cluster.spec.held_trees import HeldTrees, United
from cluster.spec.native import union as native
from cluster.spec.survival import Calibrator
from cluster.spec.tree import path_to
from tests.support.spec.trees import token_trees

needs_compiler = pytest.mark.skipif(not native.is_available(), reason="needs a C++ compiler")


def experienced(seed: int) -> Calibrator:
    """One that has seen claims which promise too much."""
    generator, calibrator = np.random.default_rng(seed), Calibrator()
    for _ in range(20):
        claimed = generator.random(16)
        calibrator.observe(claimed, generator.random(16) < 0.6 * claimed)
    return calibrator


_CALIBRATORS = (Calibrator(), experienced(0), experienced(1))


@st.composite
def held_trees(draw: st.DrawFn) -> HeldTrees:
    """Up to three trees for each of up to four sequences; commits that mostly follow the tree."""
    num_groups = draw(st.integers(1, 4))
    groups = [i for i in range(num_groups) for _ in range(draw(st.integers(0, 3)))]
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    trees = [draw(token_trees()) for _ in groups]
    claimed = [survivals(tree, generator) for tree in trees]
    known: list[FloatArray | None] = [
        survivals(tree, generator) if generator.random() < 0.3 else None for tree in trees
    ]
    committed = []
    for tree in trees:
        tokens: list[int] = []
        if len(tree) and generator.random() < 0.6:
            path = path_to(tree.parents, int(generator.integers(len(tree))))
            tokens = [int(tree.token_ids[node]) for node in path]
        if generator.random() < 0.2:
            tokens.append(int(generator.integers(6)))
        committed.append(np.array(tokens, np.int32))
    calibrators = [_CALIBRATORS[int(generator.integers(3))] for _ in trees]
    losses = [float(generator.choice([0.1, 1.0, 2.5, math.nan])) for _ in trees]
    return HeldTrees(trees, claimed, known, calibrators, committed, groups, losses, num_groups)


def survivals(tree: TokenTree, generator: np.random.Generator) -> FloatArray:
    """What a drafter may claim: not increasing along a path, with zeros and ones among them."""
    shares = generator.choice([0.0, 0.2, 0.5, 0.8, 0.97, 1.0], len(tree))
    found: list[float] = []
    for parent, share in zip(tree.parents.tolist(), shares.tolist(), strict=True):
        found.append(share * (found[parent] if parent >= 0 else 1.0))
    return np.array(found, np.float32)


def shape(forest: Forest) -> list[list[int]]:
    return [
        column.tolist()
        for column in (forest.token_ids, forest.parents, forest.owners, forest.starts)
    ]


def assert_equal(found: United, expected: United) -> None:
    assert found.roots.tolist() == expected.roots.tolist()
    assert shape(found.left) == shape(expected.left)
    assert shape(found.merged) == shape(expected.merged)
    for name in ("claimed", "calibrated", "survival", "claims"):
        values, others = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(values, others, rtol=2e-6, atol=1e-7, err_msg=name)
        assert values.dtype == np.float32


@needs_compiler
@given(held_trees())
def test_both_ways_agree(held: HeldTrees) -> None:
    assert_equal(native.unite(held), union.unite_by_arrays(held))


@needs_compiler
def test_both_ways_agree_on_a_large_batch() -> None:
    generator = np.random.default_rng(5)
    trees, committed = [], []
    for _ in range(96):
        parents = [-1, *(int(generator.integers(-1, node)) for node in range(1, 64))]
        trees.append(TokenTree.of(range(64), parents))
        committed.append(np.array([0] if generator.random() < 0.5 else [], np.int32))
    held = HeldTrees(
        trees, [survivals(tree, generator) for tree in trees], [None] * 96,
        [_CALIBRATORS[index % 3] for index in range(96)], committed,
        [index // 3 for index in range(96)], [0.5] * 96, 32,
    )  # fmt: skip
    found = native.unite(held)
    assert found.merged.num_nodes > 1000
    assert_equal(found, union.unite_by_arrays(held))


@pytest.mark.parametrize(
    "unite",
    [union.unite_by_arrays, pytest.param(native.unite, marks=needs_compiler)],
    ids=["arrays", "native"],
)
def test_two_drafters_of_a_sequence_share_its_tree_by_trust(
    unite: type[union.unite],  # type: ignore[valid-type]
) -> None:
    """The first sequence's text has gone on by a token that both had drafted."""
    chain = TokenTree.of([7, 8, 9], [-1, 0, 1])
    fork = TokenTree.of([7, 8, 5], [-1, 0, 0])
    other = TokenTree.of([3], [-1])
    values = np.array([0.8, 0.4, 0.2], np.float32)
    held = HeldTrees(
        [chain, fork, other], [values, values, values[:1]], [values, values, values[:1]],
        [_CALIBRATORS[0]] * 3, [np.array([7], np.int32)] * 2 + [np.array([], np.int32)],
        [0, 0, 1], [0.0, math.log(3.0), math.nan], 2,
    )  # fmt: skip

    found = unite(held)

    assert found.roots.tolist() == [0, 0, -1]
    assert found.merged.token_ids.tolist() == [8, 9, 5, 3]
    assert found.merged.parents.tolist() == [-1, 0, -1, -1]
    # Given that 7 was reached: 0.5 of both; the first is trusted three times as much.
    expected = [0.5, 0.75 * 0.25, 0.25 * 0.25, 0.8]
    np.testing.assert_allclose(found.survival, expected, rtol=1e-6)
    claims = [[0.5, 0.25, np.nan, 0.8], [0.5, np.nan, 0.25, np.nan]]
    np.testing.assert_allclose(found.claims, claims, rtol=1e-6)


@needs_compiler
def test_wider_numbers_are_converted_for_the_native_code() -> None:
    """As a drafter in this process may send them."""
    tree = TokenTree(np.array([7, 8], np.int64), np.array([-1, 0], np.int64))  # type: ignore[arg-type]
    values = np.array([0.8, 0.4], np.float64)
    held = HeldTrees(
        [tree], [values], [None], [_CALIBRATORS[1]], [np.array([7], np.int64)], [0], [0.1], 1,
    )  # type: ignore[list-item]  # fmt: skip
    assert_equal(native.unite(held), union.unite_by_arrays(held))


def test_a_text_that_leaves_the_tree_leaves_nothing_of_it() -> None:
    chain = TokenTree.of([7, 8], [-1, 0])
    values = np.array([0.8, 0.4], np.float32)
    held = HeldTrees(
        [chain], [values], [None], [_CALIBRATORS[1]], [np.array([7, 9], np.int32)], [0], [0.1], 1
    )

    found = union.unite(held)

    assert found.roots.tolist() == [-2]
    assert found.left.num_nodes == found.merged.num_nodes == 0
