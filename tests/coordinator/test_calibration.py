"""The gauges of how well drafters' claims are calibrated."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.coordinator import calibration
from cluster.coordinator.calibration import CalibrationBook, Lesson
from cluster.coordinator.in_flight import InFlight
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
    monkeypatch.setattr(calibration, "_MAX_CALIBRATORS", 2)
    book, recorder = CalibrationBook(), Recorder()
    for task, exported in (("x", ["x"]), ("y", ["x", "y"]), ("z", ["y", "z"]), ("y", ["y", "z"])):
        book.learn([lesson(task)])
        book.record(recorder)
        assert tasks_in(recorder) == exported


def test_greedy_and_sampled_text_of_a_task_are_learned_apart() -> None:
    book, recorder = CalibrationBook(), Recorder()
    book.learn([lesson("x")])
    book.learn([lesson("x", is_sampled=True)])
    book.record(recorder)
    assert tasks_in(recorder) == ["x", "x"]
    text = recorder.render().decode()
    assert 'law="greedy"' in text
    assert 'law="sampled"' in text
