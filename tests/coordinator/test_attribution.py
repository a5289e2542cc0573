"""Verified nodes are credited to whom proposed them, each to one."""

from __future__ import annotations

import numpy as np

from cluster import metrics
from cluster.coordinator.present import Events, Series
from cluster.core import token_array
from cluster.messages import TextVerdict
from cluster.metrics import Metric
from cluster.metrics.recorder import Recorder
from tests.support.coordinator.house import request

NAMES = ("a", "b")


def verdict(
    accepted: list[int],
    owners: tuple[int, ...],
    num_nodes: int,
    verified: tuple[int, ...],
    credited: tuple[int, ...],
) -> TextVerdict:
    """accepted: of each accepted node, the bits of its drafters; owners: for whom it counts."""
    tokens = token_array([5] * (len(accepted) + 1))
    return TextVerdict(
        "r",
        1,
        9,
        tokens,
        np.array(accepted, np.uint32),
        owners=owners,
        num_nodes=num_nodes,
        verified=verified,
        credited=credited,
    )


def credited(*verdicts: TextVerdict) -> Recorder:
    recorder = Recorder()
    series = Series(recorder, Events(recorder))
    for each in verdicts:
        series.credit(request(task="code"), NAMES, each)
    return recorder


def value(recorder: Recorder, metric: Metric, **labels: str) -> float | None:
    return recorder.registry.get_sample_value(f"{metric.name}_total", labels)


def test_a_node_of_two_drafters_counts_for_one_and_is_shared_with_the_other() -> None:
    both = verdict([0b11, 0b01], (1, 0), 3, (3, 1), (2, 1))
    recorder = credited(both, both)

    for drafter, place in (("a", "1"), ("b", "0")):
        labels = {"drafter": drafter, "task": "code"}
        assert value(recorder, metrics.NUM_DRAFTS, **labels) == 2
        assert value(recorder, metrics.NUM_ACCEPTED_TOKENS, **labels) == 2
        of_depth = {"drafter": drafter, "position": place}
        assert value(recorder, metrics.NUM_ACCEPTED_PER_POS, **of_depth) == 2
    shared = {"drafter": "a", "task": "code"}
    assert value(recorder, metrics.NUM_SHARED_TOKENS, **shared) == 2
    assert value(recorder, metrics.NUM_DRAFT_TOKENS, drafter="a", task="code") == 4
    assert value(recorder, metrics.NUM_DRAFT_TOKENS, drafter="b", task="code") == 2
    assert value(recorder, metrics.SPEC_STEPS, task="code") == 2


def test_a_drafter_none_of_whose_nodes_were_taken_is_not_counted() -> None:
    recorder = credited(verdict([], (), 3, (3, 0), (3, 0)))

    assert value(recorder, metrics.NUM_DRAFTS, drafter="a", task="code") == 1
    assert value(recorder, metrics.NUM_DRAFTS, drafter="b", task="code") is None
