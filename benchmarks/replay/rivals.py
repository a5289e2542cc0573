"""Rivals of the control loop, and drafters that are no use to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.core import EMPTY_TOKENS, EMPTY_TREE, TokenTree
from cluster.plan.in_flight import Round
from cluster.simulate.replay import Playing
from cluster.simulate.world import NOTHING, DraftSource, Offer, RecordedText, best
from cluster.spec.budget import Ask
from cluster.spec.native.trees import Held, merge_trees
from cluster.spec.survival import Calibrator


class Fixed:
    """A policy that always verifies the best num_nodes nodes of each text."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def plan(self, batch: Sequence[Playing], now: float, prompt_rows: int) -> Sequence[TokenTree]:
        trees = []
        for own in batch:
            tree = EMPTY_TREE
            if self._num_nodes and own.growing:
                (growing,) = own.growing.values()
                if growing.num_nodes(now) <= self._num_nodes:
                    tree = growing.at(own.recorded, now)[0]
                else:
                    tree = best(growing.source(own.recorded, own.position), self._num_nodes)[0]
            elif own.offers:
                ((tree, _),) = own.offers.values()
            trees.append(tree)
            own.text.ask = Ask(self._num_nodes)
        return trees

    def first_ask(self, own: Playing, now: float) -> None:
        own.text.ask = Ask(self._num_nodes)

    def learn(self, batch: Sequence[Playing], done: Round) -> None:
        pass


def merged(names: tuple[str, ...]) -> DraftSource:
    """Some recorded drafters with their trees merged, as the best fixed budget uses them."""
    known: dict[tuple[int, int], Offer] = {}

    def tree_at(text: RecordedText, position: int) -> Offer:
        key = (id(text), position)
        if key not in known:
            offers = [text.trees[name].at(position) for name in names]
            trees = [Held(0, *each, each[1], Calibrator(), EMPTY_TOKENS) for each in offers]
            union = merge_trees(trees, 1)
            known[key] = union.merged.split()[0], union.survival
        return known[key]

    return tree_at


def random_source() -> DraftSource:
    """A drafter that is sure of itself and never right: a trunk with a twig at each node."""
    size = 32
    parents = [-1 if node < 2 else node - 2 if node % 2 == 0 else node - 3 for node in range(size)]
    tree = TokenTree.of([-2 - node for node in range(size)], parents)
    depth = [node // 2 + 1 for node in range(size)]
    shares = [0.85**d if node % 2 == 0 else 0.1 * 0.85 ** (d - 1) for node, d in enumerate(depth)]
    claimed = np.array(shares, dtype=np.float32)
    return lambda text, position: (tree, claimed)


def silent_source() -> DraftSource:
    """A drafter that never says anything."""
    return lambda text, position: NOTHING
