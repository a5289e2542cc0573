"""Four states, one back-off: when speculation stops as a whole, and when it is tried again."""

from __future__ import annotations

import logging

import pytest

from cluster.spec import evidence
from cluster.spec.throttle import State, Throttle

STEP_S = 0.010


def run(throttle: Throttle, now: float, num_rounds: int, gain: float) -> float:
    """So many rounds, each of which gains that share of a step; returns when they have ended."""
    for _ in range(num_rounds):
        if throttle.state(now) in (State.SPECULATE, State.RETRY):
            throttle.settle(now, STEP_S, (1.0 + gain) * STEP_S)
        now += STEP_S
    return now


def test_losses_that_luck_does_not_explain_pause_it_for_a_second() -> None:
    throttle = Throttle()
    now = run(throttle, 0.0, 40, gain=-0.2)
    assert throttle.state(now) is State.PAUSE
    assert throttle.state(now + 1.0) is State.RETRY


def test_fewer_rounds_than_tell_something_never_pause_it() -> None:
    throttle = Throttle()
    now = run(throttle, 0.0, evidence.FEW - 1, gain=-9.0)
    assert throttle.state(now) is State.SPECULATE
    assert throttle.state(run(throttle, now, 1, gain=-9.0)) is State.PAUSE


def test_every_retry_that_fails_doubles_the_back_off_and_one_that_gains_ends_it() -> None:
    throttle = Throttle()
    now, pauses = 0.0, []
    for _ in range(4):
        while throttle.state(now) is not State.PAUSE:
            now = run(throttle, now, 1, gain=-0.3)
        began = now
        while throttle.state(now) is State.PAUSE:
            now += STEP_S
        pauses.append(now - began)
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 8.0], abs=0.05)
    now = run(throttle, now, 40, gain=0.5)
    assert throttle.state(now) is State.SPECULATE
    assert throttle.state(now) is State.SPECULATE
    while throttle.state(now) is not State.PAUSE:
        now = run(throttle, now, 1, gain=-0.3)
    assert throttle.state(now + 1.0) is State.RETRY


def test_rare_gains_are_waited_for() -> None:
    """Fifteen steps of sixteen lose a little, and one brings three tokens: that is a gain."""
    throttle = Throttle()
    now = 0.0
    for _ in range(100):
        for gain in (*[-0.05] * 15, 3.0):
            now = run(throttle, now, 1, gain)
            assert throttle.state(now) is State.SPECULATE


def test_nothing_worth_it_for_a_second_is_plain_until_something_is() -> None:
    throttle = Throttle()
    throttle.judged(0.0, is_worth=True)
    throttle.judged(0.9, is_worth=False)
    assert throttle.state(0.9) is State.SPECULATE
    throttle.judged(1.1, is_worth=False)
    assert throttle.state(1.1) is State.PLAIN
    throttle.judged(5.0, is_worth=True)
    assert throttle.state(5.0) is State.SPECULATE


def test_every_change_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    throttle = Throttle("target=t law=greedy sequences=4")
    with caplog.at_level(logging.INFO):
        run(throttle, 0.0, 40, gain=-0.2)
    (record,) = caplog.records
    assert "target=t law=greedy sequences=4: speculate -> pause" in record.message
    assert "next try in 1 s" in record.message
