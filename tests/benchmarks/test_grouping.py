from __future__ import annotations

import pytest

from benchmarks.grouping import summary


def test_the_ratio_is_that_of_runs_which_followed_one_another() -> None:
    """The machine was twice as fast in the second pair; grouped gains 10 % there, 20 % before."""
    found = summary([(120.0, 100.0), (220.0, 200.0), (100.0, 100.0)])
    assert found["grouped, tokens/s"] == 120.0
    assert found["mixed, tokens/s"] == 100.0
    assert found["grouped over mixed"] == pytest.approx(1.1)
    assert (found["least"], found["greatest"], found["pairs"]) == (1.0, 1.2, 3)
