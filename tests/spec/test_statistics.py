"""The statistics of a text end where the text ends."""

from cluster.core import SpeculationStats
from cluster.requests.fields import StepCount
from cluster.spec.statistics import TextStatistics

STEPS = (
    StepCount(((),), 0, {}, 0.0),
    StepCount((("b", "a"), ("a",), ()), 3, {"a": 3, "b": 1}, 1.0),
    StepCount((("b",), ()), 2, {"b": 2}, 2.0),
    StepCount(((),), 0, {}, 3.0),
)
WHOLE = SpeculationStats(num_steps=4, num_spec_steps=2, num_accepted_draft_tokens=3)


def told(num_tokens: int) -> SpeculationStats:
    statistics = TextStatistics()
    statistics.take(STEPS, num_tokens)
    return statistics.of(WHOLE)


def test_a_whole_text_has_all_its_steps():
    assert told(7) == SpeculationStats(
        num_steps=4,
        num_spec_steps=2,
        num_draft_tokens=5,
        num_accepted_draft_tokens=3,
        acceptance_histogram=(0, 1, 1),
        accepted_by_drafter={"a": 1, "b": 2},
        shared_by_drafter={"a": 1},
        verified_by_drafter={"a": 3, "b": 3},
        decode_time_s=3.0,
    )


def test_what_was_accepted_behind_the_end_is_left_out():
    for num_tokens in range(8):
        stats = told(num_tokens)
        accepted = stats.num_accepted_draft_tokens
        assert accepted <= max(num_tokens - 1, 0) or not num_tokens
        histogram = stats.acceptance_histogram
        assert sum(histogram) == stats.num_spec_steps or not num_tokens
        if num_tokens:
            assert sum(k * count for k, count in enumerate(histogram)) == accepted
            assert sum(stats.accepted_by_drafter.values()) == accepted
    assert told(2) == SpeculationStats(
        num_steps=2,
        num_spec_steps=1,
        num_draft_tokens=3,
        num_accepted_draft_tokens=1,
        acceptance_histogram=(0, 1),
        accepted_by_drafter={"b": 1},
        shared_by_drafter={"a": 1},
        verified_by_drafter={"a": 3, "b": 1},
        decode_time_s=1.0,
    )


def test_a_text_that_ends_before_its_first_drafts_was_too_short_for_them():
    assert told(1).idle_because == "too_short"
    assert told(2).idle_because == ""


def test_an_empty_last_step_counts_as_a_step():
    statistics = TextStatistics()
    statistics.take([STEPS[0], StepCount((), 2, {"a": 2}, 1.0)], 1)
    assert statistics.snapshot("").acceptance_histogram == (1,)


def test_without_steps_what_the_coordinator_says_stands():
    assert TextStatistics().of(WHOLE) is WHOLE
