"""What plain decoding takes without drafters: when it is measured, and what it changes."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.spec.budget import BudgetController
from cluster.spec.drafts import BudgetRules, SequenceDraft, Share
from cluster.spec.quiet import QuietTimes, Silences


def test_the_factor_waits_for_samples_and_follows_the_load() -> None:
    times = QuietTimes()
    times.record(4, 0.010)
    times.record(4, 0.012)
    assert times.factor(4, 0.020) == 1.0
    times.record(4, 0.010)
    assert times.factor(4, 0.020) == 0.5
    for _ in range(3):
        times.record(4, 0.015)
    assert times.factor(4, 0.020) == 0.75
    assert times.factor(16, 0.020) == 1.0


def test_drafters_never_make_plain_steps_look_slower_than_they_are() -> None:
    times = QuietTimes()
    for _ in range(3):
        times.record(1, 0.030)
    assert times.factor(1, 0.020) == 1.0


def silence(silences: Silences, sequences: int, factor: float, *, samples: bool = True) -> int:
    """Rounds until the silence is over; silences: a silence has just begun."""
    for count in range(1, 100):
        silences.round_ended(sequences, is_sample=samples and count > 1, factor=factor)
        if not silences.is_silent:
            return count
    raise AssertionError("it never ended")


def rounds_until_silence(silences: Silences, sequences: int) -> int:
    for count in range(1, 100_000):
        silences.round_ended(sequences, is_sample=False, factor=1.0)
        if silences.is_silent:
            return count
    raise AssertionError("it never came")


def test_a_load_begins_with_a_short_silence_and_has_another_now_and_then() -> None:
    silences = Silences()
    assert rounds_until_silence(silences, 4) == 1
    assert silence(silences, 4, 0.7) == 4
    assert rounds_until_silence(silences, 4) == 512
    assert silence(silences, 4, 0.7) == 4
    assert rounds_until_silence(silences, 4) == 512


def test_where_it_makes_no_difference_silences_get_rare() -> None:
    silences = Silences()
    rounds_until_silence(silences, 1)
    pauses = []
    for _ in range(8):
        silence(silences, 1, 1.0)
        pauses.append(rounds_until_silence(silences, 1))
    assert pauses == [1024, 2048, 4096, 8192, 16384, 16384, 16384, 16384]


def test_a_silence_without_samples_is_given_up() -> None:
    silences = Silences()
    rounds_until_silence(silences, 2)
    assert silence(silences, 2, 1.0, samples=False) == 16
    assert rounds_until_silence(silences, 2) == 64


def test_another_load_ends_a_silence_and_begins_its_own() -> None:
    silences = Silences()
    rounds_until_silence(silences, 2)
    assert silence(silences, 16, 1.0) == 4
    assert rounds_until_silence(silences, 16) == 1


def test_what_pays_only_beside_idle_drafters_is_not_bought() -> None:
    """A plain step takes 20 ms beside drafters and 10 ms without; eight nodes for a gain of 0.6
    tokens look well at first and are a loss."""
    rules = BudgetRules(max_draft_tokens=8, max_slowdown=0.02, slack_steps=1e6)
    draft = SequenceDraft(np.array([0.3, 0.2, 0.1], dtype=np.float32), max_nodes=8)

    def chosen(*, knows: bool) -> list[int]:
        controller = BudgetController(rules)
        for _ in range(8):
            controller.record(1, 0, 0.020)
            for nodes in (1, 2, 3):
                controller.record(1, nodes, 0.021)
            if knows:
                controller.record(1, 0, 0.010, is_quiet=True)
        return [len(controller.choose([draft]).nodes[0]) for _ in range(20)]

    assert max(chosen(knows=True)) == 0
    assert sorted(chosen(knows=False))[10] == 3


def test_declined_drafters_get_a_pause_and_a_longer_one_when_they_are_declined_again() -> None:
    silences = Silences()
    lengths = []
    for _ in range(5):
        silences.pause(4)
        assert silences.is_silent
        lengths.append(silence_length(silences, 4))
    assert lengths == [32, 128, 512, 512, 512]
    for _ in range(200):
        silences.round_ended(4, is_sample=False, factor=0.7)
    silences.pause(4)
    assert silence_length(silences, 4) == 32


def silence_length(silences: Silences, sequences: int) -> int:
    for count in range(1, 10_000):
        silences.round_ended(sequences, is_sample=True, factor=0.7)
        if not silences.is_silent:
            return count
    raise AssertionError("it never ended")


def test_a_pause_ends_when_the_load_changes_and_goes_on_when_it_is_back() -> None:
    silences = Silences()
    silence(silences, 2, 0.7)  # what is measured once at any load
    silences.pause(16)
    assert silence_length(silences, 2) == 4
    for _ in range(8):
        silences.round_ended(2, is_sample=False, factor=0.7)
        assert not silences.is_silent
    silences.round_ended(16, is_sample=False, factor=0.7)
    assert silences.is_silent
    assert silences.num_left == 32 - 4 - 8 - 1
    assert silence_length(silences, 16) == 32 - 4 - 8 - 1
    assert silences.num_left == 0


def test_a_pause_outlasts_the_end_of_a_request_and_the_prompt_of_the_next() -> None:
    silences = Silences()
    silences.pause(4)
    for count in range(1, 32):
        silences.round_ended(3 if count % 5 < 3 else 4, is_sample=True, factor=0.7)
        assert silences.is_silent
    assert silence_length(silences, 4) == 1


def test_a_load_that_is_paused_as_well_goes_on_in_silence() -> None:
    silences = Silences()
    silences.pause(2)
    silences.pause(16)
    for _ in range(31):
        silences.round_ended(2, is_sample=True, factor=0.7)
        assert silences.is_silent
    assert silence_length(silences, 2) == 1


def test_a_budget_counts_what_it_declines() -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=8, probe_interval=1000))
    for _ in range(8):
        controller.record(1, 0, 0.010)
        controller.record(1, 1, 0.050)
    hopeless = SequenceDraft(np.array([0.1], dtype=np.float32), max_nodes=8)
    for count in range(1, 6):
        controller.choose([hopeless])
        assert controller.num_declined(1) == count
    controller.forget_declined()
    assert controller.num_declined(1) == 0


def test_pauses_get_shorter_while_speculation_gains_between_them() -> None:
    silences = Silences()
    silences.pause(4)
    lengths = [silence_length(silences, 4)]
    for has_gained in (False, True, True, True, True, True, False):
        silences.pause(4, has_gained=has_gained)
        lengths.append(silence_length(silences, 4))
    assert lengths == [32, 128, 64, 32, 16, 8, 8, 32]


def test_a_budget_knows_whether_speculation_gained_since_it_was_last_asked() -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=8))
    for _ in range(8):
        controller.record(2, 0, 0.010)
    assert controller.take_spell(2) is None
    for _ in range(4):
        assert controller.take_spell(2) is None  # too few to tell
        controller.settle([Share(2, 3), Share(2, 3)], 0.020)  # 6 tokens; plain steps make 4
        controller.settle([Share(0, 1), Share(0, 1)], 0.010)
        controller.settle([Share(0, 1), Share(0, 1)], 0.010, is_quiet=True)  # no drafters at work
    assert controller.take_spell(2) == pytest.approx(0.040 / 0.030)
    assert controller.take_spell(2) is None


def test_a_pause_after_too_few_rounds_to_tell_is_as_long_as_the_last_one() -> None:
    silences = Silences()
    lengths = []
    for has_gained in (None, None, False, None):
        silences.pause(4, has_gained=has_gained)
        lengths.append(silence_length(silences, 4))
    assert lengths == [32, 32, 128, 128]
