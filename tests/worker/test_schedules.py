"""Draft-length schedules in a target: steps stay below their caps, and no text depends on them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.draft_length import DraftLengthConfig, DraftLengthOverride
from cluster.core import SamplingParams
from cluster.requests.fields import PlainWhy
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import Steps, steps
from tests.support.worker.texts import LAWS, opened, plain

DRAFTED: dict[str, Any] = {"drafters": ("a",)}


async def num_nodes(
    target: Steps, *names: str, params: SamplingParams, **fields: Any
) -> list[list[int]]:
    """Write these texts; returns the nodes that each step verified, by text."""
    desk = target.connect()
    desk.post(*(opened(name, params=params, **{**DRAFTED, **fields}) for name in names))
    await target.run()
    for name in names:
        assert desk.text(name) == plain(params=params)
    return [[verdict.num_nodes for verdict in desk.verdicts[name]] for name in names]


KINDS: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    # Beside the most nodes of a step, the first steps of a text whose drafts are all right.
    "adaptive": ({}, 16, [0, 16, 16]),
    "constant": ({"num_tokens": 3}, 3, [0, 3, 3, 3, 3, 3, 3, 3, 3]),
    "heuristic": ({"num_tokens": 2, "max_tokens": 6}, 6, [0, 2, 2, 4, 6, 6, 6]),
    "window": ({"num_tokens": 2, "max_tokens": 5}, 5, [0, 3, 3, 4, 5, 5, 5]),
    "threshold": ({"threshold": 1.0}, 0, [0] * 40),
}


@LAWS
@pytest.mark.parametrize("budget", ["fixed", "adaptive"])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_step_is_above_the_schedule_and_the_text_is_the_same(
    kind: str, budget: str, params: SamplingParams
) -> None:
    settings, most, first = KINDS[kind]
    schedule = DraftLengthConfig(kind=kind, **settings)  # type: ignore[arg-type]
    oracle = GreedyOracle(100)
    built = steps(residents=[resident(oracle)], budget=budget, draft_length=schedule)
    async with built as target:
        (nodes,) = await num_nodes(target, "r", params=params)
        (few,) = await num_nodes(target, "s", params=params, max_draft_tokens=1)
    assert max(few) <= 1
    assert max(nodes) <= most
    if budget == "fixed" and params.temperature == 0.0:
        assert nodes[: len(first)] == first


async def test_rules_go_by_the_class_the_task_and_the_load() -> None:
    rules = (
        DraftLengthOverride(latency_class="throughput", max_draft_tokens=3),
        DraftLengthOverride(task="code", max_draft_tokens=2),
        DraftLengthOverride(load_from=3, max_draft_tokens=1),
        DraftLengthOverride(latency_class="interactive"),
    )
    schedule = DraftLengthConfig(overrides=rules)
    settings: dict[str, Any] = {"residents": [resident(GreedyOracle(100))]}
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    async with steps(draft_length=schedule, **settings) as target:
        (free,) = await num_nodes(target, "a", params=greedy)
        (classed,) = await num_nodes(target, "b", params=greedy, latency_class="throughput")
        (coded,) = await num_nodes(target, "c", params=greedy, task="code")
        crowd = await num_nodes(target, "d", "e", "f", params=greedy)
        (none,) = await num_nodes(target, "g", params=greedy, latency_class="interactive")
        desk = target.desks[-1]
    assert [max(each) for each in (free, classed, coded, *crowd, none)] == [16, 3, 2, 1, 1, 1, 0]
    assert {verdict.why for verdict in desk.verdicts["g"][1:-1]} == {PlainWhy.SCHEDULE}
