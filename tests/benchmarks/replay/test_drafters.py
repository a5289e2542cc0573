"""Drafters are judged along recorded answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.replay.drafters import Claims, missed
from cluster.core import Proposal, TokenTree


def proposal(survival: list[float]) -> Proposal:
    tree = TokenTree.of([5, 6, 7], [-1, 0, 0])
    return Proposal("a", 1, 0, 0, tree, np.array(survival, dtype=np.float32))


def test_nodes_on_the_accepted_path_count_as_accepted() -> None:
    claims = Claims()
    claims.judge(proposal([0.9, 0.5, 0.25]), 2)
    claims.judge(proposal([0.9, 0.5, 0.25]), -1)
    assert claims.accepted == [True, False, True, False, False, False]


def test_the_error_is_that_of_claims_of_equal_size() -> None:
    claims = Claims()
    assert math.isnan(claims.error())
    for last in (0, 0, 0, -1):
        claims.judge(proposal([0.75, 0.0, 0.0]), last)
    assert claims.error() == 0.0
    claims.judge(proposal([0.75, 1.0, 0.0]), 0)
    # Bins: 5 claims of 0.75 with 4 accepted, one of 1 with none, the rest right.
    assert claims.error() == pytest.approx((0.25 + 1.0) / 15)


def test_missed_bars_are_named() -> None:
    good = {"tokens per step": 2.3, "calibration error": 0.04}
    bad = {"tokens per step": 2.1, "calibration error": float("nan")}
    assert missed({"lm": good}) == []
    lines = missed({"lm": good, "other": bad})
    assert len(lines) == 2
    assert all(line.startswith("other: ") for line in lines)
