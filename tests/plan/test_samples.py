"""Measured values on their way from a target to whoever exports them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import metrics
from cluster.messages import Sample
from cluster.metrics.recorder import Recorder
from cluster.plan.samples import Samples, Tally, enter


def lines(recorder: Recorder) -> list[str]:
    """Of metrics that have a value which is not zero."""
    text = recorder.render().decode().splitlines()
    return sorted(
        line
        for line in text
        if not line.startswith("#") and "_created" not in line and not line.endswith(" 0.0")
    )


def do(samples: Samples, amount: float) -> None:
    samples.add(metrics.DRAFTER_FAULTS, amount, drafter="a", why="stalled")
    samples.add(metrics.DRAFTER_FAULTS, drafter="a", why="stalled")
    samples.add(metrics.DRAFTER_FAULTS, drafter="b", why="stalled")
    samples.set(metrics.DRAFTER_REQUESTS, amount, drafter="a", worker="w")
    samples.set(metrics.DRAFTER_REQUESTS, amount + 1, drafter="a", worker="w")


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=4), st.data())
def test_what_is_taken_and_entered_is_what_was_done(
    amounts: list[float], data: st.DataObject
) -> None:
    """However often it is taken on the way."""
    direct, exported, tally = Recorder(), Recorder(), Tally()
    for amount in amounts:
        do(direct, amount)
        do(tally, amount)
        if data.draw(st.booleans()):
            enter(tally.take(), exported)
    enter(tally.take(), exported)
    values, others = ([line.split() for line in lines(each)] for each in (direct, exported))
    assert [name for name, _ in others] == [name for name, _ in values]
    assert [float(value) for _, value in others] == pytest.approx([float(v) for _, v in values])


def test_nothing_is_told_twice_and_a_gauge_only_where_it_has_changed() -> None:
    tally = Tally()
    do(tally, 3.0)
    assert sorted((each.how, each.labels, each.value) for each in tally.take()) == [
        ("add", ("a", "stalled"), 4.0), ("add", ("b", "stalled"), 1.0), ("set", ("a", "w"), 4.0),
    ]  # fmt: skip
    assert tally.take() == ()
    tally.set(metrics.DRAFTER_REQUESTS, 4.0, drafter="a", worker="w")
    assert tally.take() == ()
    tally.set(metrics.DRAFTER_REQUESTS, 0.0, drafter="a", worker="w")
    assert [each.value for each in tally.take()] == [0.0]


def test_whoever_takes_from_now_on_is_told_every_gauge_and_no_count_of_before() -> None:
    tally = Tally()
    do(tally, 3.0)
    tally.take()
    tally.tell_all()
    assert tally.take() == (Sample(metrics.DRAFTER_REQUESTS.name, "set", ("a", "w"), 4.0),)


FAULTS, REQUESTS = metrics.DRAFTER_FAULTS.name, metrics.DRAFTER_REQUESTS.name


@pytest.mark.parametrize(
    "sample",
    [
        Sample("drafthouse_of_another_release", "add", (), 1.0),
        Sample(FAULTS, "add", ("a",), 1.0),
        Sample(FAULTS, "add", ("a", "why", "more"), 1.0),
        Sample(FAULTS, "add", ("a", "why"), -1.0),
        Sample(FAULTS, "add", ("a", "why"), math.nan),
        Sample(FAULTS, "set", ("a", "why"), 1.0),
        Sample(REQUESTS, "add", ("b", "w"), 1.0),
        Sample(REQUESTS, "set", ("b", "w"), math.inf),
        Sample(REQUESTS, "replace", ("b", "w"), 1.0),  # type: ignore[arg-type]
    ],
)
def test_a_sample_that_means_nothing_here_is_left_out(sample: Sample) -> None:
    recorder, alone = Recorder(), Recorder()
    good = Sample(REQUESTS, "set", ("a", "w"), -2.5)
    enter([sample, good], recorder)
    enter([good], alone)
    assert lines(recorder) == lines(alone) != []
