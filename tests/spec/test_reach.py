"""A text earns the nodes that are verified for it."""

from __future__ import annotations

from cluster.spec.reach import Reach


def test_it_doubles_while_drafts_are_accepted() -> None:
    reach, found = Reach(), []
    for _ in range(4):
        found.append(reach.max_nodes)
        reach.record(reach.max_nodes, reach.max_nodes)
    assert found == [8, 20, 44, 92]


def test_failures_bring_it_down_to_a_few_and_one_success_back() -> None:
    reach = Reach()
    reach.record(8, 8)
    for _ in range(8):
        reach.record(4, 0)
    assert reach.max_nodes <= 10
    for _ in range(60):
        reach.record(4, 0)
    assert reach.max_nodes == 5
    reach.record(4, 4)
    assert reach.max_nodes == 12


def test_steps_without_drafts_change_nothing() -> None:
    reach = Reach()
    for _ in range(100):
        reach.record(0, 0)
    assert reach.max_nodes == 8
