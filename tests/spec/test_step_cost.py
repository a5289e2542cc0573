"""A few measured steps tell the whole staircase, and each size its own step."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.spec.step_cost import EDGES, CostTable, draft_shape, step_shape
from cluster.spec.step_profile import StepProfile


def staircase() -> StepProfile:
    found = StepProfile.of((1, 24, 25, 128), (0.010, 0.010, 0.020, 0.060))
    assert found is not None
    return found


def table() -> CostTable:
    return CostTable(step_shape(staircase()), is_in_seconds=True)


def recorded(times: CostTable, num_sequences: int, num_nodes: int, time_s: float) -> None:
    for _ in range(9):
        times.record(num_sequences, num_nodes, time_s)


def test_a_profile_is_believed_from_the_first_step() -> None:
    assert table().estimate(4, 8) == pytest.approx(0.010)
    assert CostTable(step_shape(None)).at_edges(4) is None


def test_what_is_not_measured_differs_from_the_profile_as_what_is() -> None:
    times = table()
    recorded(times, 16, 0, 0.015)
    assert times.estimate(16, 0) == pytest.approx(0.015, rel=0.01)
    assert times.estimate(16, 32) == pytest.approx(1.5 * (0.020 + 23 * 0.04 / 103), rel=0.02)
    assert times.estimate(64, 0) == pytest.approx(1.5 * (0.020 + 39 * 0.04 / 103), rel=0.1)


def test_a_size_that_is_measured_goes_by_its_own_times() -> None:
    times = table()
    recorded(times, 16, 0, 0.010)
    recorded(times, 16, 16, 0.040)
    assert times.estimate(16, 0) == pytest.approx(0.010, rel=0.01)
    assert times.estimate(16, 16) == pytest.approx(0.040, rel=0.01)


def test_more_nodes_never_take_less() -> None:
    times = table()
    recorded(times, 4, 4, 0.030)
    recorded(times, 4, 16, 0.010)
    found = times.at_edges(4)
    assert found is not None
    assert len(found) == len(EDGES)
    assert (np.diff(found) >= 0.0).all()


def test_stray_slow_steps_change_nothing_and_a_new_load_is_believed_soon() -> None:
    times = table()
    recorded(times, 1, 0, 0.010)
    for _ in range(3):
        times.record(1, 0, 0.1)
    assert times.estimate(1, 0) == pytest.approx(0.010, rel=0.01)
    for _ in range(2):
        times.record(1, 0, 0.1)
    assert times.estimate(1, 0) == pytest.approx(0.1, rel=0.01)


def test_drafting_nothing_takes_nothing() -> None:
    drafting = CostTable(draft_shape)
    assert drafting.at_edges(4) is None
    drafting.record(4, 8, 0.004)
    assert drafting.estimate(4, 0) == 0.0
    assert drafting.estimate(4, 8) == pytest.approx(0.004)


def test_large_trees_that_took_little_tell_that_small_ones_do() -> None:
    """As residents of SmolLM2 on two cores: what one node takes is not what each takes."""
    drafting = CostTable(draft_shape)
    recorded(drafting, 1, 16, 0.0045)
    drafting.record(1, 1, 0.0036)
    drafting.record(1, 1, 0.0090)  # the text before had to be read
    found = drafting.at_edges(1)
    assert found is not None
    assert drafting.estimate(1, 16) == pytest.approx(0.0045, rel=0.1)
    assert found[1 : EDGES.index(16) + 1].max() < 0.008


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ([[len(EDGES), 0, [1.0]]], "another form"),
        ([[0, -1, [1.0]]], "another form"),
        ([[0, 0, []]], "no times"),
        ([[0, 0, [0.0]]], "no times"),
        ([[0, 0, [float("inf")]]], "no times"),
    ],
)
def test_a_record_of_another_form_is_refused(state: list[list[object]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        table().restore(state)
