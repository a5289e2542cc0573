"""How the overlap benchmark evaluates rounds and counters."""

from __future__ import annotations

import pytest

from benchmarks.rounds.overlap import gained, middle, missed, series_of, shares

BEFORE = """\
# TYPE drafthouse_drafter_commits_total counter
drafthouse_drafter_commits_total{drafter="lm",task="code"} 10
# TYPE drafthouse_draft_seconds_total counter
drafthouse_draft_seconds_total{drafter="lm"} 1.0
"""
AFTER = """\
# TYPE drafthouse_drafter_commits_total counter
drafthouse_drafter_commits_total{drafter="lm",task="code"} 28
drafthouse_drafter_commits_total{drafter="lm",task="prose"} 2
# TYPE drafthouse_draft_seconds_total counter
drafthouse_draft_seconds_total{drafter="lm"} 1.4
# TYPE drafthouse_pre_drafted_steps_total counter
drafthouse_pre_drafted_steps_total{drafter="lm",task="code",outcome="hit"} 9
drafthouse_pre_drafted_steps_total{drafter="lm",task="code",outcome="miss"} 3
drafthouse_pre_drafted_steps_total{drafter="ngram",task="code",outcome="miss"} 99
"""
ROUNDS = [
    {"step_time_s": 0.04, "period_s": period_s, "num_nodes": 4}
    for period_s in (0.043, 0.044, 0.060)
]


def test_a_series_gains_what_is_new_in_it() -> None:
    before, after = series_of(BEFORE), series_of(AFTER)
    assert gained(before, after, "drafthouse_drafter_commits") == 20
    assert gained(before, after, "drafthouse_drafter_commits", task="code") == 18
    assert gained(before, after, "drafthouse_drafter_commits", drafter="other") == 0


def test_drafting_is_per_commit() -> None:
    found = shares(ROUNDS, series_of(BEFORE), series_of(AFTER), ["lm", "unused"])
    assert found["lm: drafting over step"] == pytest.approx(0.4 / 20 / 0.04)
    assert found["lm: pre-drafted"] == 0.75
    assert found["period over step"] == pytest.approx(1.1)
    assert not any(name.startswith("unused") for name in found)


def test_each_bar_is_named_where_it_is_missed() -> None:
    good = {"period over step": 1.02, "lm: pre-drafted": 0.9}
    assert missed("greedy", good, "lm") == []
    assert missed("t0.8", good | {"lm: pre-drafted": 0.76}, "lm") == []
    assert len(missed("greedy", good | {"lm: pre-drafted": 0.76}, "lm")) == 1
    assert len(missed("greedy", {"period over step": 1.2}, "lm")) == 2


def test_the_middle_of_the_runs_is_taken_figure_by_figure() -> None:
    assert middle([{"a": 1.0, "b": 5.0}, {"a": 3.0}, {"a": 2.0, "b": 7.0}]) == {"a": 2.0, "b": 6.0}
