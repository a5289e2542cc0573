"""One price decides how much is verified; what drafting is worth follows from what trees added, at
whatever price nodes have."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cluster.spec.budget import SIZES, Arm, Prices, Recent, choose_nodes, ranking
from cluster.spec.step_profile import EDGES, NODE_EDGES

NODE_S = 0.001


def prices(rate: float, max_extra_s: float = math.inf) -> Prices:
    """Every node takes a millisecond."""
    return Prices(rate, NODE_S * NODE_EDGES, max_extra_s)


def test_a_node_is_verified_while_it_brings_more_than_its_time_does_otherwise() -> None:
    gains = np.array([0.9, 0.8, 0.5, 0.3, 0.1])
    for rate, expected in ((0.0, 5), (200.0, 4), (400.0, 3), (850.0, 1), (950.0, 0)):
        assert choose_nodes(gains, prices(rate)).num_nodes == expected


def test_the_value_is_what_is_left_after_paying() -> None:
    choice = choose_nodes(np.array([0.9, 0.8]), prices(500.0))
    assert (choice.num_nodes, choice.value) == (2, pytest.approx(0.7))
    assert choose_nodes(np.array([0.1]), prices(500.0)).value == 0.0
    assert choose_nodes(np.empty(0), prices(500.0)).num_nodes == 0


def test_the_guard_bounds_the_whole_round() -> None:
    gains = np.full(8, 0.9)
    assert choose_nodes(gains, prices(1.0, 0.0035)).num_nodes == 3
    assert choose_nodes(gains, prices(1.0, 0.0035), spent_s=0.002).num_nodes == 1
    assert choose_nodes(gains, prices(1.0, 0.0), spent_s=0.002).num_nodes == 0


def test_every_beginning_of_the_ranking_is_closed_under_parents() -> None:
    generator = np.random.default_rng(3)
    parents = np.array([-1, 0, 1, -1, 3, 3, 0, 6])
    survival = np.empty(8, dtype=np.float32)
    for node, parent in enumerate(parents):
        # Equal survivals included: the parent goes first all the same.
        share = generator.choice([1.0, 0.5, 0.9])
        survival[node] = share * (1.0 if parent < 0 else survival[parent])
    nodes, gains = ranking(survival, np.full(8, 2.0), np.ones(8, dtype=np.bool_))
    assert (np.diff(gains) <= 0.0).all()
    for place, node in enumerate(nodes):
        assert parents[node] < 0 or parents[node] in nodes[:place]


def test_nodes_that_are_not_admitted_or_hopeless_are_not_ranked() -> None:
    survival = np.array([0.5, 0.0, 0.9, 0.7], dtype=np.float32)
    admitted = np.array([True, True, False, True])
    nodes, gains = ranking(survival, np.ones(4), admitted)
    assert nodes.tolist() == [3, 0]
    assert gains.tolist() == pytest.approx([0.7, 0.5])


FREE = Prices(1.0, np.zeros(len(EDGES)), 1.0)
ONE_TEXT = np.ones(1)


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
    assert worth.values(ONE_TEXT, prices(400.0)) == pytest.approx([0.9, 0.9, 0.9, 0.9])


def test_drafts_that_are_worth_much_in_few_places_are_worth_something_at_a_high_price() -> None:
    """Their mean survival alone is below the price of a node."""
    worth = Arm()
    for _ in range(200):
        chain(worth, [0.95, 0.95])
        chain(worth, [0.05, 0.05], turns=3)
    assert worth.values(ONE_TEXT, prices(500.0))[0] == pytest.approx(0.2, abs=0.05)


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
