"""Verified nodes are credited to whom proposed them, each to one."""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster import metrics
from cluster.coordinator.present import Events, Series
from cluster.core import EMPTY_TOKENS
from cluster.messages import TextVerdict
from cluster.metrics import Metric
from cluster.metrics.recorder import Recorder
from tests.support.coordinator.house import request


class Credited:
    """What is counted of verdicts; accepted: of each accepted node, the bits of its drafters."""

    def __init__(self, *verdicts: dict[str, Any]) -> None:
        self._recorder = Recorder()
        series = Series(self._recorder, Events(self._recorder))
        for each in verdicts:
            accepted = np.array(each.pop("accepted"), np.uint32)
            verdict = TextVerdict("r", 1, 9, EMPTY_TOKENS, accepted, **each)
            series.credit(request(task="code"), ("a", "b"), verdict)

    def value(self, metric: Metric, **labels: str) -> float | None:
        labels = {"task": "code", **labels} if "task" in metric.labels else labels
        return self._recorder.registry.get_sample_value(f"{metric.name}_total", labels)


def test_a_node_of_two_drafters_counts_for_one_and_is_shared_with_the_other() -> None:
    nodes = {"owners": (1, 0), "num_nodes": 3, "verified": (3, 1), "credited": (2, 1)}
    found = Credited(*({"accepted": [0b11, 0b01], **nodes} for _ in range(2)))
    for drafter, position, num_own in (("a", "1", 4), ("b", "0", 2)):
        assert found.value(metrics.NUM_DRAFTS, drafter=drafter) == 2
        assert found.value(metrics.NUM_DRAFT_TOKENS, drafter=drafter) == num_own
        assert found.value(metrics.NUM_ACCEPTED_TOKENS, drafter=drafter) == 2
        assert found.value(metrics.NUM_ACCEPTED_PER_POS, drafter=drafter, position=position) == 2
    assert found.value(metrics.NUM_SHARED_TOKENS, drafter="a") == 2
    assert found.value(metrics.SPEC_STEPS) == 2


def test_a_drafter_none_of_whose_nodes_were_taken_is_not_counted() -> None:
    nodes = {"owners": (), "num_nodes": 3, "verified": (3, 0), "credited": (3, 0)}
    found = Credited({"accepted": [], **nodes})
    assert found.value(metrics.NUM_DRAFTS, drafter="a") == 1
    assert found.value(metrics.NUM_DRAFTS, drafter="b") is None
