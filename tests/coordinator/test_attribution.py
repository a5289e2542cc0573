"""Verified nodes are credited to whom proposed them, each to one."""

from __future__ import annotations

import numpy as np

from cluster import metrics
from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.statistics import Attribution
from cluster.core import TokenTree, token_array
from cluster.metrics import Metric, Recorder

TREE = TokenTree.chain([5, 6, 7])
NAN = float("nan")


def value(recorder: Recorder, metric: Metric, **labels: str) -> float | None:
    return recorder.registry.get_sample_value(f"{metric.name}_total", labels)


def test_a_node_of_two_drafters_counts_for_the_first_and_is_shared_by_the_other() -> None:
    claimed = np.array([[0.9, NAN, NAN], [0.6, 0.8, 0.7]], np.float32)
    both = InFlight(9, TREE, ("a", "b"), (1, 3), claimed)
    attribution, recorder = Attribution(), Recorder()

    for _ in range(2):
        attribution.add("code", both, token_array([0, 1]))
    attribution.record(recorder)

    for drafter, drafted, accepted, shared in (("a", 2, 2, None), ("b", 4, 2, 2)):
        labels = {"drafter": drafter, "task": "code"}
        assert value(recorder, metrics.NUM_DRAFTS, **labels) == 2
        assert value(recorder, metrics.NUM_DRAFT_TOKENS, **labels) == drafted
        assert value(recorder, metrics.NUM_ACCEPTED_TOKENS, **labels) == accepted
        assert value(recorder, metrics.NUM_SHARED_TOKENS, **labels) == shared
    depths = [[value(recorder, metrics.NUM_ACCEPTED_PER_POS, drafter=drafter, task="code",
                     position=position) for position in "01"] for drafter in "ab"]  # fmt: skip
    assert depths == [[2, None], [None, 2]]
    for metric, total in (
        (metrics.SPEC_STEPS, 2), (metrics.DRAFT_TOKENS, 6), (metrics.ACCEPTED_TOKENS, 4),
    ):  # fmt: skip
        assert value(recorder, metric, task="code") == total
    assert both.credited(token_array([0, 1])) == ([1, 1], [0, 1])


def test_a_drafter_none_of_whose_nodes_were_taken_is_not_counted() -> None:
    claimed = np.array([[0.9, 0.8, 0.7], [NAN, NAN, NAN]], np.float32)
    attribution, recorder = Attribution(), Recorder()

    attribution.add("code", InFlight(9, TREE, ("a", "b"), (3, 0), claimed), token_array([]))
    attribution.record(recorder)

    assert value(recorder, metrics.NUM_DRAFTS, drafter="a", task="code") == 1
    assert value(recorder, metrics.NUM_DRAFTS, drafter="b", task="code") is None
