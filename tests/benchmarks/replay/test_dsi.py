"""Several verifiers of one text, in virtual time: what right and wrong drafts make of them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.replay.dsi import Line, best_path, judge
from benchmarks.replay.machines import GPU
from benchmarks.replay.synthetic import texts
from cluster.core import TokenTree
from cluster.simulate.texts import RecordedText
from cluster.simulate.world import recorded

STEP_S = GPU.step_s(1, 1)


def line(num_verifiers: int, num_nodes: int = 2, rate: float = 1e9, latency_s: float = 0.0) -> Line:
    return Line(GPU, recorded("lm"), num_verifiers, num_nodes, rate, latency_s)


def text(agreement: float) -> RecordedText:
    return texts(1, 60, agreement)[0]


def test_the_best_path_follows_the_promises() -> None:
    tree = TokenTree.of([5, 6, 7, 8], [-1, -1, 1, 1])
    survival = np.array([0.2, 0.7, 0.1, 0.3], dtype=np.float32)
    assert best_path(tree, survival).tolist() == [6, 8]
    assert best_path(TokenTree.of([], []), survival).tolist() == []


def test_one_verifier_steps_through_right_drafts() -> None:
    assert line(1).time_s(text(1.0)) == pytest.approx(20 * STEP_S, rel=0.01)


def test_verdicts_of_right_drafts_come_at_the_drafters_pace() -> None:
    """Two nodes each 0.5 ms: with enough verifiers nothing waits but the last verdict."""
    found = line(64, rate=2000.0).time_s(text(1.0))
    assert found == pytest.approx(60 * 0.0005 + STEP_S, rel=0.1)
    # Two tokens each instead of three, for the one behind a path is the next verifier's own.
    assert line(2).time_s(text(1.0)) == pytest.approx(30 / 2 * STEP_S, rel=0.01)


@pytest.mark.parametrize("num_verifiers", [1, 8])
def test_wrong_drafts_wait_for_every_verdict(num_verifiers: int) -> None:
    found = line(num_verifiers, latency_s=0.001).time_s(text(0.0))
    assert found == pytest.approx(60 * (STEP_S + 0.001), rel=0.01)


def test_one_verifier_is_compared_at_its_best() -> None:
    found = judge(texts(4, 40, 0.7), GPU, 2000.0, verifiers=(1, 2), seconds=1.0)
    assert found.one[0] > 1.2
    assert found.gain == pytest.approx(found.several[2][0] / found.one[0])
    assert 0.5 < found.gain < 2.0
