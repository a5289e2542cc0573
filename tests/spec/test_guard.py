"""Speculation never costs more than it has earned, and a little more: the theorem, as a test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.spec.guard import SAVED, DeficitGuard

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
) -> None:
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


def test_what_is_lost_is_earned_back_by_plain_rounds() -> None:
    guard = DeficitGuard(SLOWDOWN, 1.0)
    guard.settle(2.5 * STEP_S, STEP_S, STEP_S)
    assert guard.max_extra_s(STEP_S) < 0.0
    for _ in range(50):
        guard.settle(STEP_S, STEP_S, STEP_S, is_plain=True)
    assert guard.max_extra_s(STEP_S) == pytest.approx(0.52 * STEP_S)


def test_gains_are_saved_up_to_a_bound_and_what_plain_rounds_allow_is_not() -> None:
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


def test_noise_of_a_plain_round_never_fills_the_account() -> None:
    guard = DeficitGuard(slowdown=0.0, slack_steps=1.0)
    guard.settle(3.0, 1.0, 5.0)
    left_s = guard.max_extra_s(5.0)
    assert left_s == pytest.approx(3.0)
    guard.settle(9.0, 1.0, 5.0, is_plain=True)
    assert guard.max_extra_s(5.0) == 0.0
    guard.settle(9.0, 1.0, 5.0, is_plain=True)
    assert guard.max_extra_s(5.0) == 0.0


def test_other_limits_hold_from_the_next_round_on() -> None:
    guard, strict = (DeficitGuard(SLOWDOWN, SLACK_STEPS) for _ in range(2))
    strict.slowdown, strict.slack_steps = SLOWDOWN, 1.0
    for each in (guard, strict):
        each.settle(STEP_S, STEP_S, STEP_S, is_plain=True)
    assert guard.max_extra_s(STEP_S) == pytest.approx(SLACK_STEPS * STEP_S)
    assert strict.max_extra_s(STEP_S) == pytest.approx(STEP_S)
