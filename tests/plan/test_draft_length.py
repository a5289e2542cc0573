"""Caps in the controller: no plan is above their caps, whatever its drafts are worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.config.draft_length import DraftLengthConfig, DraftLengthOverride
from cluster.plan.in_flight import Moment, Round
from cluster.plan.texts import Text
from tests.support.plan.played import LM, STEP_S, Played, text_of

BUDGETS = pytest.mark.parametrize("budget", ["fixed", "adaptive"])


def stage_of(budget: str = "fixed", **settings: Any) -> Played:
    """A text whose drafts are right, with any schedule."""
    stage = Played(budget=budget, draft_length=DraftLengthConfig(**settings))
    stage.claimed = np.cumprod([0.9] * 8).astype(np.float32)
    return stage


@BUDGETS
def test_a_constant_bounds_every_step_and_every_ask(budget: str) -> None:
    stage = stage_of(kind="constant", num_tokens=3, budget=budget)
    plans = stage.run(100)
    assert max(len(plan.in_flight[0].tree) for plan in plans) == 3
    assert max(plan.ask.num_nodes for plan in plans) <= 3
    assert max(stage_of(budget=budget).verified(100)) == 8


@BUDGETS
def test_a_request_may_lower_a_schedule_and_no_schedule_raises_its_limit(budget: str) -> None:
    for kind in ("constant", "heuristic", "window", "threshold", "adaptive"):
        stage = stage_of(kind=kind, num_tokens=6, budget=budget)
        stage.text.max_draft_tokens = 2
        assert max(stage.verified(40)) == 2


def test_the_heuristic_follows_what_was_accepted() -> None:
    stage = stage_of(kind="heuristic", num_tokens=2)
    # A length is that of the tree that is drafted after the step.
    assert stage.verified(8) == [0, 2, 2, 4, 6, 8, 8, 8]
    stage.depth = 0
    assert stage.verified(10) == [8, 7, 6, 5, 4, 3, 2, 1, 1, 1]


def test_a_step_that_failed_teaches_no_length() -> None:
    stage = stage_of(kind="heuristic", num_tokens=2)
    stage.verified(2)
    text = stage.text
    stage.plan()  # its step is lost
    text.held.clear()
    stage.plan()
    stage.controller.learn(Round([text], [1], 0, STEP_S))
    assert text.draft_len == 4


@BUDGETS
def test_a_threshold_cuts_trees_where_a_token_is_too_unlikely(budget: str) -> None:
    stage = stage_of(kind="threshold", threshold=0.5, budget=budget)
    stage.claimed = np.cumprod([0.9, 0.8, 0.3, 0.9, 0.9, 0.9]).astype(np.float32)
    assert max(stage.verified(8)) == 2
    stage = stage_of(kind="threshold", threshold=0.95, budget=budget)
    stage.claimed = np.cumprod([0.6, 0.99, 0.99]).astype(np.float32)
    assert max(stage.verified(8)) == 0


def caps(stage: Played, texts: list[Text]) -> list[int]:
    stage.texts = texts
    stage.plan()
    return [text.cap for text in texts]


def test_the_first_override_that_fits_lowers_the_cap() -> None:
    rules = (
        DraftLengthOverride(latency_class="interactive", max_draft_tokens=7),
        DraftLengthOverride(task="code", max_draft_tokens=4),
        DraftLengthOverride(load_from=4, max_draft_tokens=2),
    )
    stage = stage_of(kind="constant", num_tokens=6, overrides=rules)
    texts = [text_of("a"), text_of("b", "code"), text_of("c", "code@sql")]
    texts[0].latency_class = "interactive"
    assert caps(stage, texts) == [6, 4, 4]
    assert caps(stage, [text_of("d")]) == [6]
    assert caps(stage, [*texts, text_of("d")]) == [6, 4, 4, 2]
    assert caps(stage, [text_of("e", "code", 3)]) == [3]


def test_nothing_is_drafted_after_a_prompt_whose_text_may_have_no_drafts() -> None:
    rules = (DraftLengthOverride(task="code"),)
    for budget in ("fixed", "adaptive"):
        stage = stage_of(budget=budget, overrides=rules)
        texts = [text_of("a", task) for task in ("code", "default")]
        for text in texts:
            stage.controller.first_ask(text, Moment(0.0, (LM,)))
        assert [text.ask.num_nodes for text in texts] == [0, 8]
