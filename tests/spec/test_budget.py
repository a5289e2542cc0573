"""One price decides how much is verified; what drafting is worth follows from what trees added, at
whatever price nodes have."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.spec.budget import SIZES, Arm, Prices, Recent, choose_nodes, ranking
from cluster.spec.guard import SAVED, DeficitGuard
from cluster.spec.step_profile import EDGES, NODE_EDGES

NODE_S = 0.001


def prices(rate: float, max_extra_s: float = math.inf) -> Prices:
    """Every node takes a millisecond."""
    return Prices(rate, NODE_S * NODE_EDGES, max_extra_s)


def test_a_node_is_verified_while_it_brings_more_than_its_time_does_otherwise():
    gains = np.array([0.9, 0.8, 0.5, 0.3, 0.1])
    for rate, expected in ((0.0, 5), (200.0, 4), (400.0, 3), (850.0, 1), (950.0, 0)):
        assert choose_nodes(gains, prices(rate)).num_nodes == expected


def test_the_value_is_what_is_left_after_paying():
    choice = choose_nodes(np.array([0.9, 0.8]), prices(500.0))
    assert (choice.num_nodes, choice.value) == (2, pytest.approx(0.7))
    assert choose_nodes(np.array([0.1]), prices(500.0)).value == 0.0
    assert choose_nodes(np.empty(0), prices(500.0)).num_nodes == 0


def test_the_guard_bounds_the_whole_round():
    gains = np.full(8, 0.9)
    assert choose_nodes(gains, prices(1.0, 0.0035)).num_nodes == 3
    assert choose_nodes(gains, prices(1.0, 0.0035), spent_s=0.002).num_nodes == 1
    assert choose_nodes(gains, prices(1.0, 0.0), spent_s=0.002).num_nodes == 0


def test_every_beginning_of_the_ranking_is_closed_under_parents():
    generator = np.random.default_rng(3)
    parents = np.array([-1, 0, 1, -1, 3, 3, 0, 6])
    survival = np.empty(8, np.float32)
    for node, parent in enumerate(parents):
        # Equal survivals included: the parent goes first all the same.
        share = generator.choice([1.0, 0.5, 0.9])
        survival[node] = share * (1.0 if parent < 0 else survival[parent])
    nodes, gains = ranking(survival, np.full(8, 2.0), np.ones(8, np.bool_))
    assert (np.diff(gains) <= 0.0).all()
    for place, node in enumerate(nodes):
        assert parents[node] < 0 or parents[node] in nodes[:place]


def test_nodes_that_are_not_admitted_or_hopeless_are_not_ranked():
    survival = np.array([0.5, 0.0, 0.9, 0.7], np.float32)
    admitted = np.array([True, True, False, True])
    nodes, gains = ranking(survival, np.ones(4), admitted)
    assert nodes.tolist() == [3, 0]
    assert gains.tolist() == pytest.approx([0.7, 0.5])


FREE = Prices(1.0, np.zeros(len(EDGES)), 1.0)
ONE_TEXT = np.ones(1)


def chain(worth: Arm, survival: list[float], size: int = 16, turns: int = 1) -> None:
    for _ in range(turns):
        worth.learn(np.arange(len(survival)), np.array(survival), 1, size)


def test_free_nodes_bring_the_sum_of_their_survivals():
    worth = Arm()
    chain(worth, [0.9, 0.8, 0.7, 0.6, 0.5])
    assert worth.values(ONE_TEXT, FREE) == pytest.approx([1.7, 3.0, 3.5, 3.5])
    worth.kept = Recent(0.5, 1.0)
    assert worth.values(2.0 * ONE_TEXT, FREE) == pytest.approx([1.7, 3.0, 3.5, 3.5])


def test_only_nodes_that_survive_more_often_than_they_cost_are_counted():
    worth = Arm()
    chain(worth, [0.9, 0.8, 0.3, 0.2])
    assert worth.values(ONE_TEXT, prices(400.0)) == pytest.approx([0.9, 0.9, 0.9, 0.9])


def test_drafts_that_are_worth_much_in_few_places_are_worth_something_at_a_high_price():
    """Their mean survival alone is below the price of a node."""
    worth = Arm()
    for _ in range(200):
        chain(worth, [0.95, 0.95])
        chain(worth, [0.05, 0.05], turns=3)
    assert worth.values(ONE_TEXT, prices(500.0))[0] == pytest.approx(0.2, abs=0.05)


def test_texts_without_a_draft_count():
    worth = Arm()
    worth.learn(np.array([0]), np.array([0.8]), 4, 2)
    assert worth.values(np.ones(4), FREE)[0] == pytest.approx(0.8)
    assert worth.values(ONE_TEXT, FREE)[0] == pytest.approx(0.2)


def test_small_trees_say_nothing_of_what_larger_ones_add():
    worth = Arm()
    chain(worth, [0.9] * 8)
    chain(worth, [0.1] * 2, size=2, turns=100)
    small, _, large, _ = worth.values(ONE_TEXT, FREE)
    assert small == pytest.approx(0.2, abs=0.01)
    assert large == pytest.approx(0.2 + 6 * 0.9, abs=0.01)


def test_nothing_is_worth_nothing_and_what_is_new_is_known_to_be_so():
    worth = Arm()
    assert worth.num_turns == 0
    assert worth.values(ONE_TEXT, FREE).tolist() == [0.0] * len(SIZES)


# Speculation never costs more than it has earned, and a little more: the theorem, as a test.


SLOWDOWN, SLACK_STEPS, STEP_S = 0.02, 8.0, 0.010


@example(seed=0, gain=0.0, extra=0.0, surprise=1.0)  # what is expected to be free never was
@given(
    seed=st.integers(0, 2**31),
    gain=st.floats(0.0, 4.0),
    extra=st.floats(0.0, 3.0),
    surprise=st.floats(0.0, 1.0),
)
def test_no_stretch_of_rounds_costs_more_than_the_bound(
    seed: int, gain: float, extra: float, surprise: float
):
    """Rounds gain and cost at random; each is speculative as often as the guard allows it."""
    generator = np.random.default_rng(seed)
    guard = DeficitGuard(SLOWDOWN, SLACK_STEPS)
    loss_s = worst_s = overshoot_s = total_s = 0.0
    for _ in range(400):
        expected_s = extra * STEP_S * generator.random()
        is_plain = expected_s > guard.max_extra_s(STEP_S)
        time_s, tokens = STEP_S, 1
        if not is_plain:
            beyond_s = surprise * STEP_S * generator.random()
            overshoot_s = max(overshoot_s, beyond_s)
            time_s += expected_s + beyond_s
            tokens += generator.poisson(gain)
        guard.settle(time_s, tokens * STEP_S, STEP_S, is_plain=is_plain)
        loss_s = max(loss_s, 0.0) + time_s - (1.0 + SLOWDOWN) * tokens * STEP_S
        worst_s = max(worst_s, loss_s)
        total_s += time_s - (1.0 + SLOWDOWN) * tokens * STEP_S
        assert total_s <= SLACK_STEPS * STEP_S + overshoot_s + 1e-9
    assert worst_s <= SAVED * SLACK_STEPS * STEP_S + overshoot_s + 1e-9


def test_what_is_lost_is_earned_back_by_plain_rounds():
    guard = DeficitGuard(SLOWDOWN, 1.0)
    guard.settle(2.5 * STEP_S, STEP_S, STEP_S)
    assert guard.max_extra_s(STEP_S) < 0.0
    for _ in range(50):
        guard.settle(STEP_S, STEP_S, STEP_S, is_plain=True)
    assert guard.max_extra_s(STEP_S) == pytest.approx(0.52 * STEP_S)


def test_gains_are_saved_up_to_a_bound_and_what_plain_rounds_allow_is_not():
    guard = DeficitGuard(SLOWDOWN, 1.0)
    for _ in range(100):
        guard.settle(STEP_S, STEP_S, STEP_S, is_plain=True)
    assert guard.max_extra_s(STEP_S) == pytest.approx(STEP_S)
    for _ in range(100):
        guard.settle(STEP_S, 4 * STEP_S, STEP_S)
    assert guard.max_extra_s(STEP_S) == pytest.approx(SAVED * STEP_S)
    guard.settle(STEP_S, STEP_S, STEP_S, is_plain=True)
    assert guard.max_extra_s(STEP_S) == pytest.approx(SAVED * STEP_S)
    assert guard.deficit_s == 0.0


def test_noise_of_a_plain_round_never_fills_the_account():
    guard = DeficitGuard(slowdown=0.0, slack_steps=1.0)
    guard.settle(3.0, 1.0, 5.0)
    left_s = guard.max_extra_s(5.0)
    assert left_s == pytest.approx(3.0)
    guard.settle(9.0, 1.0, 5.0, is_plain=True)
    assert guard.max_extra_s(5.0) == 0.0
    guard.settle(9.0, 1.0, 5.0, is_plain=True)
    assert guard.max_extra_s(5.0) == 0.0


def test_other_limits_hold_from_the_next_round_on():
    guard, strict = (DeficitGuard(SLOWDOWN, SLACK_STEPS) for _ in range(2))
    strict.slowdown, strict.slack_steps = SLOWDOWN, 1.0
    for each in (guard, strict):
        each.settle(STEP_S, STEP_S, STEP_S, is_plain=True)
    assert guard.max_extra_s(STEP_S) == pytest.approx(SLACK_STEPS * STEP_S)
    assert strict.max_extra_s(STEP_S) == pytest.approx(STEP_S)
