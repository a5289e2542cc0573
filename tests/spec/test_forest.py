"""What is done for a whole batch at once is what would be done tree by tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import EMPTY_TREE, FloatArray, TokenTree
from cluster.errors import ProtocolError
from cluster.spec import forest as forests
from cluster.spec import tree as trees_
from tests.support.spec.trees import token_trees


@pytest.fixture(scope="module", params=[1 << 30, -1], ids=["few nodes", "many"], autouse=True)
def limit_of_few(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small forests are looped over, large ones are not; both ways take any forest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forests, "_FEW", request.param)
        yield


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
def test_depths_and_monotone_survivals_are_those_of_each_tree(
    trees: list[TokenTree], seed: int
) -> None:
    forest, survivals = forests.join(trees), claims(trees, seed)

    bounded = forests.monotone(forest.parents, forests.concatenated(survivals))

    assert pieces(forest, forests.depths(forest.parents)) == [
        trees_.depths(tree.parents).tolist() for tree in trees
    ]
    assert pieces(forest, bounded) == [
        trees_.monotone(tree.parents, values).tolist()
        for tree, values in zip(trees, survivals, strict=True)
    ]


@given(many_trees, seeds)
def test_re_rooting_is_that_of_each_tree(trees: list[TokenTree], seed: int) -> None:
    generator = np.random.default_rng(seed)
    survivals = [np.abs(np.nan_to_num(values)) for values in claims(trees, seed)]
    committed = []
    for tree in trees:
        path = trees_.path_to(tree.parents, int(generator.integers(-1, len(tree))))
        wrong = generator.integers(0, 6, int(generator.integers(0, 2)))
        committed.append(np.concatenate([tree.token_ids[path], wrong]).astype(np.int32))
    forest = forests.join(trees)

    roots = forests.walk(forest, committed)
    kept = forests.below(forest, roots)
    rest = forest.keep(kept)
    if forest.num_nodes:
        values = forests.conditioned(forests.concatenated(survivals), forest, roots, kept)
        found = pieces(rest, values)

    for index, tree in enumerate(trees):
        result = trees_.reroot(tree, committed[index], survivals[index])
        start = int(forest.starts[index])
        assert (roots[index] == -2) == (not result.hit)
        assert int(roots[index]) - (start if roots[index] >= 0 else 0) == (
            result.node if result.hit else -2
        )
        assert same(rest.split()[index], result.tree)
        if forest.num_nodes:
            assert found[index] == result.survival.tolist()


@given(st.lists(st.lists(token_trees(vocab_size=3), max_size=3), max_size=4), seeds)
def test_merging_is_that_of_each_group(groups: list[list[TokenTree]], seed: int) -> None:
    trees = [tree for group in groups for tree in group]
    survivals = claims(trees, seed)
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    shares = np.array([1.0 / len(group) for group in groups for _ in group])
    forest = forests.join(trees)

    merged = forests.merge(forest, owners, len(groups), forests.concatenated(survivals), shares)

    places = pieces(forest, merged.places)
    first = 0
    for index, group in enumerate(groups):
        expected = trees_.merge(group, survivals[first : first + len(group)])
        assert same(merged.forest.split()[index], expected.tree)
        values = pieces(merged.forest, merged.survival)[index]
        assert values == expected.survival.tolist()
        start = int(merged.forest.starts[index])
        for bit in range(len(group)):
            own = np.flatnonzero((expected.sources >> np.uint64(bit)) & np.uint64(1))
            assert sorted(place - start for place in places[first + bit]) == own.tolist()  # type: ignore[operator]
        first += len(group)


@given(many_trees, seeds)
def test_the_best_nodes_are_those_of_each_tree(trees: list[TokenTree], seed: int) -> None:
    forest = forests.join(trees)
    survival = forests.monotone(forest.parents, forests.concatenated(claims(trees, seed)))

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


@given(many_trees, seeds)
def test_products_and_shares_are_those_of_each_tree(trees: list[TokenTree], seed: int) -> None:
    forest = forests.join(trees)
    conditionals = np.random.default_rng(seed).random(forest.num_nodes)

    shares = forests.sibling_shares(forest, conditionals)
    products = forests.path_products(forest, shares)

    for node, parent in enumerate(forest.parents.tolist()):
        siblings = (forest.parents == parent) & (forest.owners == forest.owners[node])
        total = max(sum(conditionals[siblings].tolist()), 1.0)
        assert shares[node] == pytest.approx(conditionals[node] / total)
        above = 1.0 if parent < 0 else products[parent]
        assert products[node] == shares[node] * above


@given(st.lists(token_trees(vocab_size=4), max_size=4), st.data())
def test_trees_are_sound_together_when_each_one_is(
    trees: list[TokenTree], data: st.DataObject
) -> None:
    for index, tree in enumerate(trees):
        if len(tree) and data.draw(st.booleans()):
            node = data.draw(st.integers(0, len(tree) - 1))
            tokens, parents = tree.token_ids.copy(), tree.parents.copy()
            tokens[node] = data.draw(st.integers(-1, 4))
            parents[node] = data.draw(st.integers(-2, len(tree)))
            trees[index] = TokenTree(tokens, parents)

    assert forests.are_well_formed(trees, 4) == all(is_well_formed(tree, 4) for tree in trees)


def test_arrays_of_unequal_length_are_no_tree() -> None:
    uneven = TokenTree(np.array([1, 2], np.int32), np.array([-1], np.int32))

    assert not forests.are_well_formed([uneven, EMPTY_TREE], 4)


def is_well_formed(tree: TokenTree, vocab_size: int) -> bool:
    try:
        trees_.check_tree(tree, vocab_size)
    except ProtocolError:
        return False
    return True
