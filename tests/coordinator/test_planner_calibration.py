"""The gauges of how well drafters' claims are calibrated."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.config import CoordinatorConfig
from cluster.coordinator import planner as planners
from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.planner import DraftPlanner, Lesson
from cluster.coordinator.promises import PromiseBook
from cluster.core import TokenTree
from cluster.metrics import Recorder


def lesson(task: str, *, is_sampled: bool = False) -> Lesson:
    claimed = np.array([[0.9, 0.5]], np.float32)
    in_flight = InFlight(7, TokenTree.of([1, 2], [-1, 0]), ("a",), (2,), claimed)
    return Lesson((task, is_sampled), in_flight, np.array([0], np.int32))


def tasks_in(recorder: Recorder) -> list[str]:
    name = "drafthouse_survival_calibration_error{"
    lines = [line for line in recorder.render().decode().splitlines() if line.startswith(name)]
    assert all('drafter="a"' in line for line in lines)
    return [line.split('task="')[1].split('"')[0] for line in lines]


def test_gauges_of_tasks_that_made_room_for_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planners, "_MAX_CALIBRATORS", 2)
    config, recorder = CoordinatorConfig(), Recorder()
    planner = DraftPlanner(config, PromiseBook(config))
    for task, exported in (("x", ["x"]), ("y", ["x", "y"]), ("z", ["y", "z"]), ("y", ["y", "z"])):
        planner.learn([lesson(task)])
        planner.record_calibration(recorder)
        assert tasks_in(recorder) == exported


def test_greedy_and_sampled_text_of_a_task_are_learned_apart() -> None:
    config, recorder = CoordinatorConfig(), Recorder()
    planner = DraftPlanner(config, PromiseBook(config))
    planner.learn([lesson("x")])
    planner.learn([lesson("x", is_sampled=True)])
    planner.record_calibration(recorder)
    assert tasks_in(recorder) == ["x", "x"]
    text = recorder.render().decode()
    assert 'law="greedy"' in text
    assert 'law="sampled"' in text
