"""Beam searches draft where that brings more than it costs."""

from __future__ import annotations

import pytest

from cluster.spec.beam_pace import BeamPace
from cluster.spec.step_profile import StepProfile

# Eight more rows than four cost next to nothing, or nearly as much again.
FLAT = StepProfile((1, 4, 8, 12, 64), (0.010, 0.010, 0.0101, 0.0102, 0.050))
STEEP = StepProfile((1, 4, 8, 12, 64), (0.010, 0.010, 0.013, 0.018, 0.080))
NUM_STEPS = 400


def search(
    profile: StepProfile | None, gain: float, texts_beside: int = 0
) -> tuple[float, list[int]]:
    """Return a search's speed in that without drafts, and the nodes of its forwards.

    gain: further steps that a forward with eight nodes brings; half of it with four."""
    pace, num_steps, time_s, nodes = BeamPace(profile, 16), 0.0, 0.0, list[int]()
    while num_steps < NUM_STEPS:
        nodes.append(pace.num_nodes(4, texts_beside, texts_beside))
        num_steps += 1.0 + gain * nodes[-1] / 8
        pace.learn(int(num_steps), 0)
        if profile is not None:
            rows = [4 + texts_beside, 4 + texts_beside + nodes[-1]]
            plain_s, drafted_s = profile.at(rows).tolist()
            time_s += drafted_s / plain_s
    return num_steps / time_s if time_s else 0.0, nodes


@pytest.mark.parametrize(
    ("profile", "gain", "least"),
    [(FLAT, 0.3, 1.25), (FLAT, 0.0, 0.98), (STEEP, 1.2, 1.2), (STEEP, 0.3, 0.98),
     (STEEP, 0.0, 0.98)],
)  # fmt: skip
def test_it_gains_where_steps_are_worth_the_rows_and_loses_next_to_nothing_elsewhere(
    profile: StepProfile, gain: float, least: float
) -> None:
    assert search(profile, gain)[0] > least


def test_where_rows_are_dear_fewer_are_taken() -> None:
    assert search(FLAT, 1.2)[1][-1] == 8
    assert search(STEEP, 1.2)[1][-1] == 4


def test_forwards_without_drafts_show_where_drafts_would_help() -> None:
    pace, nodes = BeamPace(STEEP, 16), list[int]()
    for forward in range(120):
        nodes.append(pace.num_nodes(4, 0, 0))
        # From the 80th on the text repeats itself.
        pace.learn(forward + 1, max(forward - 79, 0))
    assert not any(nodes[60:80])
    assert any(nodes[80:100])


def test_without_a_profile_it_always_drafts() -> None:
    assert set(search(None, 0.1)[1]) == {8}


def test_what_others_wait_for_counts_as_often_as_there_are_others() -> None:
    drafted = [sum(map(bool, search(STEEP, 1.2, others)[1])) for others in (0, 8)]
    assert drafted[1] < 0.2 * drafted[0]


def test_no_more_nodes_than_the_request_may_have() -> None:
    assert BeamPace(None, 5).num_nodes(4, 0, 0) == 5
    assert BeamPace(None, 0).num_nodes(4, 0, 0) == 0
