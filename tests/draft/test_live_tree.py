from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.draft.candidates import Ranking
from cluster.draft.live_tree import KEPT_SHARE, ROOT, LiveTree
from cluster.spec.tree_check import check_tree

RANKING = Ranking(np.array([1]), np.array([0.0]))


def grown(draw_children: list[list[float]]) -> LiveTree:
    """Expand the best leaf repeatedly; each list has the conditionals of its children."""
    tree = LiveTree()
    for index, conditionals in enumerate(draw_children):
        if index == 0:
            node = ROOT
        else:
            if tree.best_leaf_survival() == 0.0:
                break
            node = tree.pop_leaf()
            tree.assign_slots([node])
        total = sum(conditionals) + 0.1
        children = [
            (token, tree.survivals[node] * value / total)
            for token, value in enumerate(conditionals)
        ]
        tree.expand(node, RANKING, children, grows=True)
    return tree


shapes = st.lists(st.lists(st.floats(0.01, 1.0), max_size=4), min_size=1, max_size=14)


def node_paths(tree: LiveTree) -> dict[tuple[int, ...], tuple[bool, float]]:
    """Maps the path of every node below the root to (has a slot, survival)."""
    return {
        tuple(tree.path_tokens(node)): (tree.slots[node] >= 0, tree.survivals[node])
        for node in range(1, len(tree.tokens))
    }


def check_slots(tree: LiveTree) -> None:
    engine_tree = tree.engine_tree()
    check_tree(engine_tree, 4)
    for slot, node in enumerate(tree.slot_nodes):
        assert tree.slots[node] == slot
        assert tree.rankings[node] is RANKING
        parent = tree.parents[node]
        assert engine_tree.parents[slot] == (-1 if parent == ROOT else tree.slots[parent])


@given(shapes, st.integers(0, 20))
def test_the_best_nodes_are_prefix_closed_and_the_most_likely(
    shape: list[list[float]], max_nodes: int
) -> None:
    tree = grown(shape)
    check_slots(tree)
    best, survival = tree.of(tree.best_nodes(max_nodes, min_survival=0.001))
    check_tree(best, 4)
    assert len(best) == len(survival) <= max_nodes
    above = np.where(best.parents < 0, 1.0, survival[best.parents])
    assert (survival <= above).all()
    everything = sorted((value for value in tree.survivals[1:] if value >= 0.001), reverse=True)
    assert (
        sorted(survival.tolist(), reverse=True) == np.float32(everything[: len(survival)]).tolist()
    )
    assert len(best) == min(max_nodes, len(everything))


@given(shapes, st.integers(1, 20))
def test_a_leaf_that_is_not_worth_it_has_no_child_among_the_best(
    shape: list[list[float]], num_wanted: int
) -> None:
    """Of children that keep the usual share of its survival, or less."""
    tree = grown(shape)
    best = tree.best_survivals(num_wanted)
    assert best == sorted(tree.survivals[1:], reverse=True)[:num_wanted]
    least = tree.least_worth(num_wanted)
    if len(tree) < num_wanted:
        assert least == 0.0  # every child would be among them
        return
    for leaf in tree.leaves().heap:
        is_worth, child = -leaf[0] >= least, -leaf[0] * KEPT_SHARE
        assert is_worth or child <= min(best) * (1 + 1e-12)


@given(shapes, st.integers(0, 1000))
def test_a_reroot_keeps_exactly_the_subtree(shape: list[list[float]], choice: int) -> None:
    tree = grown(shape)
    if tree.num_slots == 0:
        return
    root = tree.slot_nodes[choice % tree.num_slots]
    prefix = tuple(tree.path_tokens(root))
    before, share = node_paths(tree), tree.survivals[root]
    slot_paths = [tuple(tree.path_tokens(node)) for node in tree.slot_nodes]
    leaf = tree.best_leaf_survival()
    kept_slots = tree.reroot(root)
    expected = {
        path[len(prefix) :]: value
        for path, value in before.items()
        if path[: len(prefix)] == prefix and path != prefix
    }
    after = node_paths(tree)
    assert after.keys() == expected.keys()
    for path, (has_slot, survival) in after.items():
        assert has_slot == expected[path][0]
        np.testing.assert_allclose(survival, expected[path][1] / share, rtol=1e-9)
    assert kept_slots == sorted(kept_slots)
    assert [slot_paths[slot][len(prefix) :] for slot in kept_slots] == [
        tuple(tree.path_tokens(node)) for node in tree.slot_nodes
    ]
    assert tree.best_leaf_survival() <= max(leaf / share, 0.0) + 1e-9
    check_slots(tree)


@given(shapes)
def test_a_walk_follows_the_tokens_as_far_as_the_tree_goes(shape: list[list[float]]) -> None:
    tree = grown(shape)
    for node in range(1, len(tree.tokens)):
        tokens = tree.path_tokens(node)
        path = tree.walk([*tokens, 99])
        assert path[-1] == node
        assert [tree.tokens[each] for each in path] == tokens
