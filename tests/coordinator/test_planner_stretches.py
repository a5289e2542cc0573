"""Speculation that looks worth it round by round and is a loss taken together gets a pause."""

from __future__ import annotations

import pytest

from cluster.config import CoordinatorConfig
from cluster.coordinator.arrivals import ArrivalModel
from cluster.coordinator.planner import DraftPlanner
from cluster.spec.drafts import Share

PLAIN_S = 0.030


def planner_with_quiet_times() -> DraftPlanner:
    """Plain steps of four sequences take PLAIN_S without drafters, and a tenth more beside them."""
    config = CoordinatorConfig(slowdown_slack=1000.0)  # an account that is never exhausted
    planner = DraftPlanner(config, ArrivalModel(config))
    for _ in range(9):
        planner.record_step("t", 4, 0, 1.1 * PLAIN_S, is_quiet=False)
        planner.record_step("t", 4, 0, PLAIN_S, is_quiet=True)
    return planner


def rounds_until_pause(planner: DraftPlanner, num_tokens: int, time_s: float) -> int | None:
    """Three rounds of four have nothing to verify; the fourth emits `num_tokens` in time_s."""
    for count in range(1, 400):
        speculates = count % 4 == 0
        round_s = time_s if speculates else 1.1 * PLAIN_S
        tokens = [1, 1, 1, 1]
        tokens[0] += num_tokens - 4 if speculates else 0
        shares = [Share(2 * speculates, each) for each in tokens]
        planner.settle_round("t", shares, round_s, 0.0, is_quiet=False)
        if planner.record_step("t", 4, 8 * speculates, round_s, is_quiet=False):
            return count
    return None


def test_rounds_without_drafts_count_against_those_that_gain() -> None:
    # 6 tokens in 38 ms are 18 % faster than plain decoding, three rounds of 33 ms each lose 10 %.
    planner = planner_with_quiet_times()
    assert rounds_until_pause(planner, 6, 0.038) == 64


def test_a_loss_beyond_doubt_is_seen_sooner() -> None:
    # 4 tokens in 38 ms in every fourth round, and never a gain.
    planner = planner_with_quiet_times()
    assert rounds_until_pause(planner, 4, 0.038) == 16


def test_a_gain_over_all_rounds_goes_on() -> None:
    planner = planner_with_quiet_times()
    assert rounds_until_pause(planner, 10, 0.040) is None


@pytest.mark.parametrize(("spell", "expected"), [(1.10, 16), (1.02, 128), (0.90, 128)])
def test_only_a_gain_beyond_doubt_shortens_the_next_pause(
    spell: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = planner_with_quiet_times()
    spells = [0.90, spell]
    monkeypatch.setattr(
        planner._budget(("t", False)), "take_spell", lambda num_sequences: spells.pop(0)
    )
    planner._pause(("t", False), 4)
    assert silent_rounds(planner) == 32
    planner._pause(("t", False), 4)
    assert silent_rounds(planner) == expected


def silent_rounds(planner: DraftPlanner) -> int:
    for count in range(1, 2000):
        if not planner.record_step("t", 4, 0, PLAIN_S, is_quiet=True):
            return count
    raise AssertionError("it never ended")


def test_what_sampled_text_loses_does_not_silence_greedy_text() -> None:
    planner = planner_with_quiet_times()
    record = {"is_quiet": False, "is_sampled": True}
    for _ in range(400):
        planner.settle_round("t", [Share(2, 1)] * 4, 0.038, 0.0, **record)
        if planner.record_step("t", 4, 8, 0.038, **record):
            break
    else:
        raise AssertionError("a loss in every round brought no pause")
    assert planner._silences(("t", True)).is_silent
    assert rounds_until_pause(planner, 10, 0.040) is None
    assert planner._silences(("t", True)).is_silent  # nor do greedy rounds end that pause


def test_both_laws_learn_what_steps_take_from_each_other() -> None:
    planner = planner_with_quiet_times()
    greedy, sampled = (planner._budget(("t", is_sampled)) for is_sampled in (False, True))
    assert sampled.estimate(4, 0) == greedy.estimate(4, 0) == pytest.approx(1.1 * PLAIN_S)
    assert sampled.quiet_factor(4) == greedy.quiet_factor(4) < 1.0


def test_a_fixed_budget_is_never_silenced() -> None:
    config = CoordinatorConfig(budget="fixed", slowdown_slack=1000.0)
    planner = DraftPlanner(config, ArrivalModel(config))
    assert rounds_until_pause(planner, 6, 0.038) is None
