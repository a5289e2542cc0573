"""Verified nodes are credited to whom proposed them."""

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


def test_a_node_of_two_drafters_counts_for_both_and_others_for_their_own() -> None:
    claimed = np.array([[0.9, 0.8, 0.7], [0.6, NAN, NAN]], np.float32)
    both = InFlight(9, TREE, ("a", "b"), (3, 1), claimed)
    attribution, recorder = Attribution(), Recorder()

    for _ in range(2):
        attribution.add("code", both, token_array([0, 1]))
    attribution.record(recorder)

    for drafter, drafted, accepted in (("a", 6, 4), ("b", 2, 2)):
        labels = {"drafter": drafter, "task": "code"}
        assert value(recorder, metrics.NUM_DRAFTS, **labels) == 2
        assert value(recorder, metrics.NUM_DRAFT_TOKENS, **labels) == drafted
        assert value(recorder, metrics.NUM_ACCEPTED_TOKENS, **labels) == accepted
        assert value(recorder, metrics.NUM_ACCEPTED_PER_POS, **labels, position="0") == 2
    second = value(recorder, metrics.NUM_ACCEPTED_PER_POS, drafter="b", task="code", position="1")
    assert second is None
    assert both.num_accepted(token_array([0, 1])) == (2, 1)


def test_a_drafter_none_of_whose_nodes_were_taken_is_not_counted() -> None:
    claimed = np.array([[0.9, 0.8, 0.7], [NAN, NAN, NAN]], np.float32)
    attribution, recorder = Attribution(), Recorder()

    attribution.add("code", InFlight(9, TREE, ("a", "b"), (3, 0), claimed), token_array([]))
    attribution.record(recorder)

    assert value(recorder, metrics.NUM_DRAFTS, drafter="a", task="code") == 1
    assert value(recorder, metrics.NUM_DRAFTS, drafter="b", task="code") is None
