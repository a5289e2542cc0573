"""What drafting is worth follows from what trees added, at whatever price nodes have."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.spec.arms import SIZES, Arm, Recent
from cluster.spec.budget import Prices
from cluster.spec.step_profile import EDGES, NODE_EDGES

FREE = Prices(1.0, np.zeros(len(EDGES)), 1.0)
ONE_TEXT = np.ones(1)


def priced(token_per_node: float) -> Prices:
    """A node costs so much of a token."""
    return Prices(1.0, token_per_node * NODE_EDGES, 1.0)


def chain(worth: Arm, survival: list[float], size: int = 16, turns: int = 1) -> None:
    for _ in range(turns):
        worth.learn(np.arange(len(survival)), np.array(survival), 1, size)


def test_free_nodes_bring_the_sum_of_their_survivals() -> None:
    worth = Arm()
    chain(worth, [0.9, 0.8, 0.7, 0.6, 0.5])
    assert worth.values(ONE_TEXT, FREE) == pytest.approx([1.7, 3.0, 3.5, 3.5])
    worth.kept = Recent(0.5, 1.0)
    assert worth.values(2.0 * ONE_TEXT, FREE) == pytest.approx([1.7, 3.0, 3.5, 3.5])


def test_only_nodes_that_survive_more_often_than_they_cost_are_counted() -> None:
    worth = Arm()
    chain(worth, [0.9, 0.8, 0.3, 0.2])
    assert worth.values(ONE_TEXT, priced(0.4)) == pytest.approx([0.9, 0.9, 0.9, 0.9])


def test_drafts_that_are_worth_much_in_few_places_are_worth_something_at_a_high_price() -> None:
    """Their mean survival alone is below the price of a node."""
    worth = Arm()
    for _ in range(200):
        chain(worth, [0.95, 0.95])
        chain(worth, [0.05, 0.05], turns=3)
    assert worth.values(ONE_TEXT, priced(0.5))[0] == pytest.approx(0.2, abs=0.05)


def test_texts_without_a_draft_count() -> None:
    worth = Arm()
    worth.learn(np.array([0]), np.array([0.8]), 4, 2)
    assert worth.values(np.ones(4), FREE)[0] == pytest.approx(0.8)
    assert worth.values(ONE_TEXT, FREE)[0] == pytest.approx(0.2)


def test_small_trees_say_nothing_of_what_larger_ones_add() -> None:
    worth = Arm()
    chain(worth, [0.9] * 8)
    chain(worth, [0.1] * 2, size=2, turns=100)
    small, _, large, _ = worth.values(ONE_TEXT, FREE)
    assert small == pytest.approx(0.2, abs=0.01)
    assert large == pytest.approx(0.2 + 6 * 0.9, abs=0.01)


def test_nothing_is_worth_nothing_and_what_is_new_is_known_to_be_so() -> None:
    worth = Arm()
    assert worth.num_turns == 0
    assert worth.values(ONE_TEXT, FREE).tolist() == [0.0] * len(SIZES)
