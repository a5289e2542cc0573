"""Caps in the controller: no plan is above their caps, whatever its drafts are worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster.config.draft_length import DraftLengthConfig, DraftLengthOverride
from cluster.config.schema import CoordinatorConfig
from cluster.core import TokenTree, token_array
from cluster.plan.controller import Controller
from cluster.plan.in_flight import Moment, Plan, Round
from cluster.plan.resident import DraftTurn, Resident
from cluster.plan.texts import HeldTree, Text
from cluster.spec.step_profile import StepProfile
from cluster.spec.token_log import TokenLog

STEP_S = 0.010
PROFILE = StepProfile.of((1, 16, 64), (STEP_S, STEP_S, 4 * STEP_S))
LM = Resident(0, "lm", False)
BUDGETS = pytest.mark.parametrize("budget", ["fixed", "adaptive"])


class Stage:
    """Texts whose drafts are right as far as `depth`, with any schedule.

    conditionals: that the drafter claims, of each node of its chain.
    """

    def __init__(self, num_texts: int = 1, budget: str = "fixed", **settings: Any) -> None:
        self.config = CoordinatorConfig(
            budget=budget,  # type: ignore[arg-type]
            max_draft_tokens=8,
            draft_length=DraftLengthConfig(**settings),
        )
        self.controller = Controller(self.config, PROFILE)
        self.texts = [self.text(f"r{number}") for number in range(num_texts)]
        self.now = 0.0
        self.depth = 8
        self.conditionals = [0.9] * 8

    def text(self, name: str, task: str = "default", max_draft_tokens: int = 8) -> Text:
        text = Text(name, (task, False), TokenLog(token_array([5])))
        text.max_draft_tokens, text.names = max_draft_tokens, ("lm",)
        return text

    def round(self) -> Plan:
        """Make a step of all texts; each then has a new tree if drafts were asked for."""
        moment = Moment(self.now, (LM,))
        plan = self.controller.plan(self.texts, [100] * len(self.texts), None, moment)
        counts = [len(item.tree) for item in plan.in_flight]
        num_tokens = [1 + min(count, self.depth) for count in counts]
        for text, count in zip(self.texts, num_tokens, strict=True):
            text.tokens.append(token_array([1] * min(count, self.depth)))
            if count > self.depth or not self.depth:
                text.tokens.append(token_array([9]))
            text.held.clear()
            if plan.ask.num_nodes:
                self.hold(text, plan.ask.num_nodes)
        spent_s = 0.0005 if plan.ask.num_nodes else 0.0
        self.now += STEP_S + spent_s
        turns = [DraftTurn("lm", len(self.texts), plan.ask.num_nodes, spent_s)] if spent_s else []
        self.controller.learn(
            Round(self.texts, num_tokens, sum(counts), False, STEP_S, spent_s, turns)
        )
        self.controller.score(self.texts)
        return plan

    def hold(self, text: Text, num_nodes: int, name: str = "lm") -> None:
        size = min(num_nodes, len(self.conditionals))
        tree = TokenTree.chain(([1] * self.depth + [2] * 8)[:size])
        claimed = np.cumprod(self.conditionals[:size]).astype(np.float32)
        base_len = len(text.tokens)
        text.held[name] = HeldTree(base_len, base_len, tree, claimed, is_resident=True)

    def verified(self, num_rounds: int) -> list[int]:
        """The nodes that each step verifies for the first text."""
        return [len(self.round().in_flight[0].tree) for _ in range(num_rounds)]


@BUDGETS
def test_a_constant_bounds_every_step_and_every_ask(budget: str) -> None:
    stage = Stage(kind="constant", num_tokens=3, budget=budget)
    plans = [stage.round() for _ in range(100)]
    assert max(len(plan.in_flight[0].tree) for plan in plans) == 3
    assert max(plan.ask.num_nodes for plan in plans) <= 3
    assert max(Stage(budget=budget).verified(100)) == 8


@BUDGETS
def test_a_request_may_lower_a_schedule_and_no_schedule_raises_its_limit(budget: str) -> None:
    for kind in ("constant", "heuristic", "window", "threshold", "adaptive"):
        stage = Stage(kind=kind, num_tokens=6, budget=budget)
        stage.texts[0].max_draft_tokens = 2
        assert max(stage.verified(100)) == 2


def test_the_heuristic_follows_what_was_accepted() -> None:
    stage = Stage(kind="heuristic", num_tokens=2)
    # A length is that of the tree that is drafted after the step.
    assert stage.verified(8) == [0, 2, 2, 4, 6, 8, 8, 8]
    stage.depth = 0
    assert stage.verified(10) == [8, 7, 6, 5, 4, 3, 2, 1, 1, 1]


def test_the_window_follows_the_latest_steps() -> None:
    stage = Stage(kind="window", num_tokens=4, num_steps=2)
    assert stage.verified(6) == [0, 4, 4, 5, 6, 7]
    stage.depth = 0
    assert stage.verified(8) == [8, 7, 6, 5, 4, 3, 3, 3]


def test_a_step_that_failed_teaches_no_length() -> None:
    stage = Stage(kind="heuristic", num_tokens=2)
    stage.verified(2)
    text = stage.texts[0]
    moment = Moment(stage.now, (LM,))
    stage.controller.plan([text], [100], None, moment)  # its step is lost
    text.held.clear()
    stage.controller.plan([text], [100], None, moment)
    stage.controller.learn(Round([text], [1], 0, False, STEP_S))
    assert text.draft_len == 4


@BUDGETS
def test_a_threshold_cuts_trees_where_a_token_is_too_unlikely(budget: str) -> None:
    stage = Stage(kind="threshold", threshold=0.5, budget=budget)
    stage.conditionals = [0.9, 0.8, 0.3, 0.9, 0.9, 0.9]
    assert max(stage.verified(8)) == 2
    stage = Stage(kind="threshold", threshold=0.95, budget=budget)
    stage.conditionals = [0.6, 0.99, 0.99]
    assert max(stage.verified(8)) == 0


def caps(stage: Stage, texts: list[Text]) -> list[int]:
    stage.texts = texts
    stage.controller.plan(texts, [100] * len(texts), None, Moment(0.0, (LM,)))
    return [text.cap for text in texts]


def test_the_first_override_that_fits_lowers_the_cap() -> None:
    rules = (
        DraftLengthOverride(latency_class="interactive", max_draft_tokens=7),
        DraftLengthOverride(task="code", max_draft_tokens=4),
        DraftLengthOverride(load_from=4, max_draft_tokens=2),
    )
    stage = Stage(kind="constant", num_tokens=6, overrides=rules)
    texts = [stage.text("a"), stage.text("b", "code"), stage.text("c", "code@sql")]
    texts[0].latency_class = "interactive"
    assert caps(stage, texts) == [6, 4, 4]
    assert caps(stage, [stage.text("d")]) == [6]
    assert caps(stage, [*texts, stage.text("d")]) == [6, 4, 4, 2]
    assert caps(stage, [stage.text("e", "code", 3)]) == [3]


def test_nothing_is_drafted_after_a_prompt_whose_text_may_have_no_drafts() -> None:
    rules = (DraftLengthOverride(task="code"),)
    for budget in ("fixed", "adaptive"):
        stage = Stage(budget=budget, overrides=rules)
        texts = [stage.text("a", task) for task in ("code", "default")]
        for text in texts:
            stage.controller.first_ask(text, Moment(0.0, (LM,)))
        assert [text.ask.num_nodes for text in texts] == [0, 8]
