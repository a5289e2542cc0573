"""Trees are re-rooted, calibrated and merged as the loops of the reference do it."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import FloatArray, TokenTree, token_array
from cluster.spec.native.trees import Held, MergedTrees, merge_trees
from cluster.spec.survival import Calibrator
from cluster.spec.tree import Forest
from cluster.spec.tree_check import check_tree
from tests.support.spec import in_loops
from tests.support.spec.trees import path_to, paths, token_trees

Batch = tuple[list[Held], int]


def experienced(seed: int) -> Calibrator:
    """One that has seen claims which promise too much."""
    generator, calibrator = np.random.default_rng(seed), Calibrator()
    for _ in range(20):
        claimed = generator.random(16)
        in_loops.observe(calibrator, claimed, generator.random(16) < 0.6 * claimed)
    return calibrator


_CALIBRATORS = (Calibrator(), experienced(0), experienced(1))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to three trees for each of up to four sequences; commits that mostly follow the tree."""
    num_groups = draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for group in range(num_groups):
        for _ in range(draw(st.integers(0, 3))):
            tree = draw(token_trees())
            tokens = []
            if len(tree) and generator.random() < 0.6:
                path = path_to(tree.parents, int(generator.integers(len(tree))))
                tokens = tree.token_ids[path].tolist()
            if generator.random() < 0.2:
                tokens.append(int(generator.integers(6)))
            known = survivals(tree, generator) if generator.random() < 0.3 else None
            calibrator = _CALIBRATORS[int(generator.integers(3))]
            claimed, weight = survivals(tree, generator), float(generator.choice([0.05, 1.0, 2.5]))
            found.append(Held(group, tree, claimed, known, calibrator, token_array(tokens), weight))
    return found, num_groups


def survivals(tree: TokenTree, generator: np.random.Generator) -> FloatArray:
    """What a drafter may claim: not increasing along a path, with zeros and ones among them."""
    shares = generator.choice([0.0, 0.2, 0.5, 0.8, 0.97, 1.0], len(tree))
    found = []
    for parent, share in zip(tree.parents.tolist(), shares.tolist(), strict=True):
        found.append(share * (found[parent] if parent >= 0 else 1.0))
    return np.array(found, np.float32)


def shape(forest: Forest) -> list[list[int]]:
    return [
        column.tolist()
        for column in (forest.token_ids, forest.parents, forest.owners, forest.starts)
    ]


def assert_equal(found: MergedTrees, expected: MergedTrees) -> None:
    assert found.roots.tolist() == expected.roots.tolist()
    assert shape(found.left) == shape(expected.left)
    assert shape(found.merged) == shape(expected.merged)
    assert found.places.tolist() == expected.places.tolist()
    for name in ("claimed", "calibrated", "survival"):
        values, others = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(values, others, rtol=2e-6, atol=1e-7, err_msg=name)
        assert values.dtype == np.float32


@given(batches())
def test_both_ways_agree(batch: Batch):
    assert_equal(merge_trees(*batch), in_loops.merge_trees(*batch))


def test_both_ways_agree_on_a_large_batch():
    generator, batch = np.random.default_rng(5), []
    for index in range(96):
        parents = [-1, *(int(generator.integers(-1, node)) for node in range(1, 64))]
        tree = TokenTree.of(range(64), parents)
        committed = token_array([0] if generator.random() < 0.5 else [])
        claimed, calibrator = survivals(tree, generator), _CALIBRATORS[index % 3]
        batch.append(Held(index // 3, tree, claimed, None, calibrator, committed))
    found = merge_trees(batch, 32)
    assert found.merged.num_nodes > 1000
    assert_equal(found, in_loops.merge_trees(batch, 32))


def held(tree: TokenTree, values: FloatArray, committed: Sequence[int] = (), **more: float) -> Held:
    """A calibrated tree of the first sequence, or of another `group`."""
    group, weight = int(more.get("group", 0)), more.get("weight", 1.0)
    return Held(group, tree, values, values, _CALIBRATORS[0], token_array(committed), weight)


def test_two_drafters_of_a_sequence_share_its_tree_by_trust():
    """The first sequence's text has gone on by a token that both had drafted."""
    values = np.array([0.8, 0.4, 0.2], np.float32)
    chain = held(TokenTree.of([7, 8, 9], [-1, 0, 1]), values, [7], weight=3.0)
    fork = held(TokenTree.of([7, 8, 5], [-1, 0, 0]), values, [7])
    found = merge_trees([chain, fork, held(TokenTree.of([3], [-1]), values[:1], group=1)], 2)

    assert found.roots.tolist() == [0, 0, -1]
    assert found.merged.token_ids.tolist() == [8, 9, 5, 3]
    assert found.merged.parents.tolist() == [-1, 0, -1, -1]
    # Given that 7 was reached: 0.5 of both, and behind 8 only the first has looked.  The fork alone
    # holds 5 possible, and is trusted a third as much.
    expected = [0.5, 0.25, 0.25 * 0.25, 0.8]
    np.testing.assert_allclose(found.survival, expected, rtol=1e-6)
    # What is left: 8 and 9 of the chain, 8 and 5 of the fork, and the other's 3.
    assert found.left.token_ids.tolist() == [8, 9, 8, 5, 3]
    assert found.places.tolist() == [0, 1, 0, 2, 3]


@given(batches())
def test_each_node_that_is_left_stands_in_the_union_by_its_path(batch: Batch):
    found = merge_trees(*batch)

    union = []
    for tree in found.merged.split():
        check_tree(tree, 6)
        union.append(paths(tree))
    starts = found.merged.starts.tolist()
    for index, (one, tree) in enumerate(zip(batch[0], found.left.split(), strict=True)):
        places = found.places[found.left.span(index)] - starts[one.group]
        assert [union[one.group][place] for place in places] == paths(tree)
    assert set(found.places.tolist()) == set(range(found.merged.num_nodes))


def test_a_merge_clamps_claims_that_grow_along_a_path():
    merged = merge_trees([held(TokenTree.chain([1, 2]), np.array([0.2, 0.9], np.float32))], 1)

    assert merged.survival.tolist() == pytest.approx([0.2, 0.2])
