"""A few measured rounds tell what all sizes take."""

import json

import numpy as np
import pytest

from cluster.plan.load import RoundTimes, draft_parts, step_parts
from cluster.spec.step_profile import EDGES, StepProfile


def steps(*times_s: float) -> RoundTimes:
    profile = StepProfile.of((1, 24, 25, 128), times_s or (0.010, 0.010, 0.020, 0.060))
    return RoundTimes(step_parts(profile), is_in_seconds=True)


def record(times: RoundTimes, num_sequences: int, num_nodes: int, time_s: float, n: int) -> None:
    for _ in range(n):
        times.record(num_sequences, num_nodes, time_s)


def test_a_profile_is_believed_from_the_first_step():
    assert steps().estimate(4, 8) == pytest.approx(0.010)
    assert RoundTimes(step_parts(None)).at_edges(4) is None


def test_a_slower_hour_makes_all_steps_slower():
    times = steps()
    record(times, 16, 0, 0.015, 100)
    assert times.estimate(16, 0) == pytest.approx(0.015, rel=0.03)
    assert times.estimate(1, 0) == pytest.approx(0.015, rel=0.03)


def test_what_rows_cost_is_learned_apart_from_how_fast_the_machine_is():
    """The profile knows of no price, and the machine is half as fast as it was."""
    times = steps(0.010, 0.0102, 0.01021, 0.0112)
    for _ in range(100):
        for nodes in (0, 4, 16):
            times.record(4, nodes, 0.020 + 0.001 * nodes)
    assert times.estimate(4, 0) == pytest.approx(0.020, rel=0.02)
    assert times.estimate(4, 8) == pytest.approx(0.028, rel=0.03)
    assert times.estimate(8, 8) == pytest.approx(0.028, rel=0.05)


def test_rows_of_prompts_tell_what_rows_cost_until_nodes_do():
    times = steps(0.010, 0.0102, 0.01021, 0.0112)
    for _ in range(9):
        times.record_rows(4, 100, 0.010 + 100 * 0.001)
    assert times.estimate(4, 16) == pytest.approx(0.026, rel=0.05)
    record(times, 4, 16, 0.014, 200)
    assert times.estimate(4, 16) == pytest.approx(0.014, rel=0.05)
    flat = steps(*[0.010] * 4)  # no row tells it a price
    flat.record_rows(4, 100, 0.1)
    assert flat.estimate(4, 16) == pytest.approx(0.010)


def test_rows_beside_a_step_move_it_up_the_staircase():
    times = steps()
    alone, beside = times.at_edges(4), times.at_edges(4, 19)
    two = EDGES.index(2)
    assert alone[two] - alone[0] == pytest.approx(0.0)
    assert beside[two] - beside[0] == pytest.approx(0.010)


def test_more_nodes_never_take_less():
    times = steps()
    record(times, 4, 4, 0.030, 9)
    record(times, 4, 48, 0.010, 9)
    found = times.at_edges(4)
    assert len(found) == len(EDGES)
    assert (np.diff(found) >= 0.0).all()


def test_one_stray_step_changes_little_and_a_new_speed_is_believed_soon():
    times = steps()
    record(times, 1, 0, 0.010, 64)
    times.record(1, 0, 1.0)
    assert times.estimate(1, 0) == pytest.approx(0.010, rel=0.03)
    record(times, 1, 0, 0.018, 64)
    assert times.estimate(1, 0) == pytest.approx(0.018, rel=0.2)


def test_times_that_contradict_the_parts_leave_every_estimate_above_zero():
    """A plain step that takes next to nothing, and drafted ones that take all, cannot break it."""
    times = steps()
    for _ in range(300):
        times.record(1, 0, 1e-9)
        times.record(1, 64, 1.0)
    assert 0.0 < times.estimate(1, 0) < 0.001
    found = times.at_edges(32)
    assert np.isfinite(found).all()
    assert (found > 0.0).all()


def test_drafting_nothing_takes_nothing():
    drafting = RoundTimes(draft_parts)
    assert drafting.at_edges(4) is None
    drafting.record(4, 8, 0.004)
    assert drafting.estimate(4, 0) == 0.0
    assert drafting.estimate(4, 8) == pytest.approx(0.004)


def test_a_call_its_texts_and_their_nodes_are_told_apart():
    """As residents of SmolLM2 on two cores: what one node takes is not what each takes."""
    drafting = RoundTimes(draft_parts)
    for _ in range(40):
        for count in (1, 4, 16):
            for nodes in (2, 8, 24):
                drafting.record(count, nodes, 0.0034 + 0.000055 * count * nodes)
    assert drafting.estimate(1, 1) == pytest.approx(0.0034, rel=0.15)
    assert drafting.estimate(16, 16) == pytest.approx(0.0175, rel=0.1)


def test_what_was_measured_is_kept_as_plain_values():
    times, after = steps(), steps()
    record(times, 4, 0, 0.020, 20)
    record(times, 4, 32, 0.050, 20)
    after.restore(json.loads(json.dumps(times.export())))
    assert after.estimate(4, 16) == pytest.approx(times.estimate(4, 16), rel=0.02)
    assert 0 < after.num_recorded <= times.num_recorded
    unknown = RoundTimes(draft_parts)
    unknown.restore(json.loads(json.dumps(RoundTimes(draft_parts).export())))
    assert (unknown.at_edges(1), unknown.num_recorded) == (None, 0)


@pytest.mark.parametrize(
    "state",
    [
        [[1.0], [1.0], [1.0]],
        [[], [], []],
        [[1.0, float("nan")], [0.0] * 4, [0.0] * 2],
        [[0.0, 1.0], [0.0] * 4, [0.0] * 2],
    ],
)
def test_a_record_of_another_form_is_refused(state: list[list[float]]):
    with pytest.raises(ValueError, match=r"another form|that are none"):
        steps().restore(state)
