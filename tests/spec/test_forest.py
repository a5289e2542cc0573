"""What is done for a whole batch at once is what would be done tree by tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import FloatArray, TokenTree
from cluster.spec import forest as forests
from cluster.spec import tree as trees_
from tests.support.spec.trees import token_trees

many_trees = st.lists(token_trees(), max_size=5)
seeds = st.integers(0, 2**32 - 1)


def claims(trees: Sequence[TokenTree], seed: int) -> list[FloatArray]:
    """Values of which some are equal, some are no probabilities, and some exceed their parent's."""
    generator = np.random.default_rng(seed)
    choices = np.array([0.0, 0.25, 0.5, 0.5, 0.9, 1.0, -0.5, np.nan], np.float32)
    return [generator.choice(choices, len(tree)) for tree in trees]


def pieces(forest: forests.Forest, values: npt.NDArray[np.generic]) -> list[list[object]]:
    return [values[start:stop].tolist() for start, stop in pairwise(forest.starts.tolist())]


def same(ours: TokenTree, theirs: TokenTree) -> bool:
    return (
        ours.token_ids.tolist() == theirs.token_ids.tolist()
        and ours.parents.tolist() == theirs.parents.tolist()
    )


@given(many_trees)
def test_trees_come_out_as_they_went_in(trees: list[TokenTree]) -> None:
    split = forests.join(trees).split()

    assert len(split) == len(trees)
    assert all(map(same, split, trees))
    assert all(tree.parents.dtype == np.int32 for tree in split)


@given(many_trees, seeds)
def test_the_best_nodes_are_those_of_each_tree(trees: list[TokenTree], seed: int) -> None:
    forest = forests.join(trees)
    survival = forests.concatenated(
        [
            trees_.monotone(tree.parents, values)
            for tree, values in zip(trees, claims(trees, seed), strict=True)
        ]
    )

    nodes, ranks = forests.ranked(survival, forest.owners, forest.starts)

    for cap in (0, 1, 3, 100):
        kept = np.zeros(forest.num_nodes, dtype=np.bool_)
        kept[nodes[ranks < cap]] = True
        expected = [
            trees_.prune(tree, values, cap)[0]
            for tree, values in zip(
                trees,
                [np.array(each, np.float32) for each in pieces(forest, survival)],
                strict=True,
            )
        ]
        assert all(map(same, forest.keep(kept).split(), expected))
