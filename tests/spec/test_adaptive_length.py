"""A text earns the nodes that are verified for it."""

from __future__ import annotations

from cluster.spec.adaptive_length import AdaptiveDraftLength


def test_it_doubles_while_drafts_are_accepted() -> None:
    length, found = AdaptiveDraftLength(), []
    for _ in range(4):
        found.append(length.max_nodes)
        length.record(length.max_nodes, length.max_nodes)
    assert found == [8, 20, 44, 92]


def test_failures_bring_it_down_to_a_few_and_one_success_back() -> None:
    length = AdaptiveDraftLength()
    length.record(8, 8)
    for _ in range(8):
        length.record(4, 0)
    assert length.max_nodes <= 10
    for _ in range(60):
        length.record(4, 0)
    assert length.max_nodes == 5
    length.record(4, 4)
    assert length.max_nodes == 12


def test_steps_without_drafts_change_nothing() -> None:
    length = AdaptiveDraftLength()
    for _ in range(100):
        length.record(0, 0)
    assert length.max_nodes == 8
