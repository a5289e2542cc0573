"""A wait is bought at the price of the tokens that its time would have brought."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cluster.spec.budget import Prices
from cluster.spec.step_cost import NODE_EDGES
from cluster.spec.waiting import NUM_RANKS, WAITS_S, ArrivalTable, choose_wait

CHAIN = np.array([0.9, 0.8, 0.7], dtype=np.float32)
STEP_S = 0.010


def after(delay_s: float, num_commits: int = 20) -> ArrivalTable:
    """A drafter whose tree comes so long after each commit, while steps take ten milliseconds."""
    table = ArrivalTable()
    for _ in range(num_commits):
        table.observe([(delay_s, CHAIN)], STEP_S)
    return table


def wait(table: ArrivalTable, rate: float = 100.0, max_extra_s: float = math.inf) -> float:
    free = Prices(rate, np.zeros(len(NODE_EDGES)), max_extra_s)
    found = choose_wait(np.empty(0), table.expected()[np.newaxis], free, 0.016, 0.0)
    return 0.0 if found is None else found.wait_s


@pytest.mark.parametrize(("delay_s", "expected"), [(0.0009, 0.001), (0.003, 0.004), (0.02, 0.0)])
def test_a_wait_is_as_long_as_trees_usually_need(delay_s: float, expected: float) -> None:
    assert wait(after(delay_s)) == expected


def test_where_time_is_dear_nobody_waits() -> None:
    assert wait(after(0.003), rate=200.0) == 0.004
    assert wait(after(0.003), rate=1000.0) == 0.0


def test_the_guard_bounds_waits() -> None:
    assert wait(after(0.003), max_extra_s=0.003) == 0.0


def test_a_few_commits_say_nothing() -> None:
    assert wait(after(0.001, num_commits=3)) == 0.0


def test_a_drafter_that_falls_silent_is_given_up_within_a_few_commits() -> None:
    table = after(0.001)
    num_silent = 0
    while wait(table) > 0.0:
        table.observe([], STEP_S, is_answered=False)
        num_silent += 1
    assert 1 <= num_silent <= 8
    for _ in range(8):
        table.observe([(0.001, CHAIN)], STEP_S)
    assert wait(table) > 0.0


def test_nothing_is_learned_of_times_that_nobody_saw() -> None:
    table = ArrivalTable()
    for _ in range(20):
        table.observe([(0.0005, CHAIN)], elapsed_s=WAITS_S[1])
    expected = table.expected()
    assert expected.shape == (len(WAITS_S), NUM_RANKS)
    np.testing.assert_allclose(expected[-1], expected[1])
