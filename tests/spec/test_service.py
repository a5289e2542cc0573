"""Nodes that texts are granted for their rates, and what a second costs those that are behind."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cluster.spec.budget import Prices
from cluster.spec.service import AIM, Service
from cluster.spec.step_cost import NODE_EDGES

STEP_S = 0.010
# Every text has three nodes; the tokens that its best 0 to 3 bring.
TOKENS = np.array([1.0, 1.5, 1.9, 2.0])


def granted(
    rates: list[float], lags: list[float] | None = None, *, node_s: float = 0.0,
    most_s: float = 1.0, tokens: np.ndarray | None = None,
) -> tuple[list[int], int]:  # fmt: skip
    """The nodes of each text, and how many texts are not served.

    rates: the speeds that are aimed at.  node_s: the time of a node.
    """
    found = Service(np.array(rates) / AIM, np.array(lags or [0.0] * len(rates)))
    all_tokens = np.tile(TOKENS, (len(rates), 1)) if tokens is None else tokens
    prices = Prices(1.0, node_s * NODE_EDGES, math.inf)
    counts, num_unserved = found.grants(all_tokens, prices, STEP_S, most_s)
    return counts.tolist(), num_unserved


def test_a_text_gets_the_nodes_that_its_rate_takes_and_no_more() -> None:
    assert granted([0.0, 90.0, 100.0, 101.0, 150.0, 160.0, 200.0]) == ([0, 0, 0, 1, 1, 2, 3], 0)


def test_a_rate_out_of_reach_is_counted_and_granted_nothing() -> None:
    assert granted([201.0, 140.0, math.inf]) == ([0, 1, 0], 2)


def test_all_grants_make_the_step_longer_and_so_take_more_of_each_other() -> None:
    # Two nodes add a fifth to the step: then 1.5 tokens are too few for 140 a second.
    assert granted([140.0], node_s=0.001) == ([2], 0)
    assert granted([125.0, 125.0], node_s=0.001) == ([1, 1], 0)


def test_of_texts_that_hinder_each_other_the_one_that_needs_most_goes_without() -> None:
    assert granted([135.0, 140.0], node_s=0.001) == ([1, 0], 1)
    assert granted([140.0, 90.0, 201.0], node_s=0.001) == ([2, 1, 0], 1)


def test_grants_end_at_the_time_that_they_may_take_and_who_needs_most_goes_without() -> None:
    assert granted([190.0, 120.0], node_s=0.0001, most_s=0.0002) == ([0, 1], 1)
    assert granted([120.0], node_s=0.0001, most_s=0.0) == ([0], 1)
    assert granted([120.0, 100.0], node_s=0.0001, most_s=-1.0) == ([0, 0], 1)


def test_who_is_behind_makes_up_for_it_and_who_is_ahead_needs_nothing() -> None:
    assert granted([100.0] * 4, [0.0, 0.4, 0.9, -3.0]) == ([0, 1, 2, 0], 0)
    assert granted([150.0], [-0.6]) == ([0], 0)
    # No more than one token in a step.
    assert granted([100.0], [1.4]) == ([3], 0)


def test_who_is_far_behind_is_given_up() -> None:
    assert granted([110.0, 110.0], [2.1, 0.0]) == ([0, 1], 1)


def test_without_drafts_only_a_rate_of_plain_decoding_is_in_reach() -> None:
    assert granted([90.0, 110.0], tokens=np.ones((2, 1))) == ([0, 0], 1)


@pytest.mark.parametrize("rate", [math.nan, -5.0])
def test_a_rate_that_is_no_number_is_none(rate: float) -> None:
    assert granted([rate, 120.0])[0] == [0, 1]


def test_a_second_costs_more_while_somebody_is_behind_whom_shorter_steps_would_help() -> None:
    weights = np.array([0.5, 2.0, 1.0, 1.0, 1.0])
    rates = np.array([100.0, 50.0, 0.0, 100.0, 120.0])

    def price(*lags: float) -> float:
        return Service(rates, np.array(lags)).price(weights, STEP_S)

    assert price(-1.0, 0.0, 9.0, 9.0, 1.0) == 0.0
    late = price(1.0, 0.1, 1.0, 3.0, 1.0)
    assert late == pytest.approx(price(1.0, 0.0, 0.0, 0.0, 0.0) + price(0.0, 1.0, 0.0, 0.0, 0.0))
    assert price(1.0, 0.0, 0.0, 0.0, 0.0) == pytest.approx(0.5 * price(0.0, 1.0, 0.0, 0.0, 0.0))
