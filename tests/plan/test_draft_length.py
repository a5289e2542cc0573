"""Draft lengths by history and rules; no plan is above them, whatever its drafts are worth."""

from typing import Any

import numpy as np
import pytest

from cluster.config.speculation import DraftLengthConfig, DraftLengthOverride
from cluster.plan.controller import applies, next_len
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
def test_a_constant_bounds_every_step_and_every_ask(budget: str):
    stage = stage_of(kind="constant", num_tokens=3, budget=budget)
    plans = stage.run(100)
    assert max(len(plan.in_flight[0].tree) for plan in plans) == 3
    assert max(plan.ask.num_nodes for plan in plans) <= 3
    assert max(stage_of(budget=budget).verified(100)) == 8


@BUDGETS
def test_a_request_may_lower_a_schedule_and_no_schedule_raises_its_limit(budget: str):
    for kind in ("constant", "heuristic", "window", "threshold", "adaptive"):
        stage = stage_of(kind=kind, num_tokens=6, budget=budget)
        stage.text.max_draft_tokens = 2
        assert max(stage.verified(40)) == 2


def test_the_heuristic_follows_what_was_accepted():
    stage = stage_of(kind="heuristic", num_tokens=2)
    # A length is that of the tree that is drafted after the step.
    assert stage.verified(8) == [0, 2, 2, 4, 6, 8, 8, 8]
    stage.depth = 0
    assert stage.verified(10) == [8, 7, 6, 5, 4, 3, 2, 1, 1, 1]


def test_what_was_chosen_and_not_verified_teaches_no_length():
    stage = stage_of(kind="heuristic", num_tokens=2)
    stage.verified(2)
    text = stage.text
    stage.plan()  # and its step is another one, which runs ahead
    stage.controller.learn(Round([text], [1], 0, STEP_S))
    assert text.draft_len == 4


@BUDGETS
def test_a_threshold_cuts_trees_where_a_token_is_too_unlikely(budget: str):
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


def test_the_first_override_that_fits_lowers_the_cap():
    rules = (
        DraftLengthOverride(class_="interactive", max_draft_tokens=7),
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


def test_nothing_is_drafted_after_a_prompt_whose_text_may_have_no_drafts():
    rules = (DraftLengthOverride(task="code"),)
    for budget in ("fixed", "adaptive"):
        stage = stage_of(budget=budget, overrides=rules)
        texts = [text_of("a", task) for task in ("code", "default")]
        for text in texts:
            stage.controller.first_ask(text, Moment(0.0, (LM,)))
        assert [text.ask.num_nodes for text in texts] == [0, 8]


MOST = 16


def lens(history: str, **settings: Any) -> list[int]:
    """The draft lengths of a text's steps, from the first on.

    history: of each step with drafts accepted/depth.
    """
    config = DraftLengthConfig(**settings)
    found = [next_len(config, config.num_tokens, (), MOST)]
    fates = []
    for step in history.split():
        accepted, _, depth = step.partition("/")
        fates = [*fates, (int(accepted), int(depth))][-config.num_steps :]
        found.append(next_len(config, found[-1], fates, MOST))
    return found


HEURISTIC = {"kind": "heuristic"}
WINDOW = {"kind": "window"}


@pytest.mark.parametrize(
    ("settings", "history", "expected"),
    [
        (HEURISTIC, "5/5 7/7 9/9", [5, 7, 9, 11]),
        (HEURISTIC, "4/5 0/4 0/3 0/2 0/1", [5, 4, 3, 2, 1, 1]),
        ({**HEURISTIC, "num_tokens": 0}, "", [1]),
        ({**HEURISTIC, "num_tokens": 99}, "0/9", [16, 15]),
        ({**HEURISTIC, "min_tokens": 4, "max_tokens": 6}, "1/1 0/1 0/1 0/1", [5, 6, 5, 4, 4]),
        (WINDOW, "0/5 0/4 0/3", [5, 4, 3, 3]),
        (WINDOW, "3/4 3/4 3/4", [5, 5, 5, 5]),
        (WINDOW, "9/9 " * 9, [5, 6, 7, 8, 9, 10, 11, 12, 12, 12]),
        # One miss in ten steps of one token leaves 0.9, which is not above it.
        (
            {**WINDOW, "num_tokens": 3},
            "1/1 1/1 0/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1",
            [3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6],
        ),
        ({**WINDOW, "num_steps": 1}, "0/4 4/4 2/4 3/4", [5, 4, 5, 4, 4]),
        ({**WINDOW, "raise_above": 0.4, "lower_below": 0.2}, "2/4 1/4 0/4", [5, 6, 6, 6]),
    ],
)
def test_the_length_follows_the_history(
    settings: dict[str, Any], history: str, expected: list[int]
):
    assert lens(history, **settings) == expected


@pytest.mark.parametrize(
    ("settings", "former", "fates", "most", "expected"),
    [(HEURISTIC, 5, [], 2, 2), (HEURISTIC, 2, [(2, 2)], 3, 3), (WINDOW, 5, [], 0, 0)],
)
def test_no_length_is_above_what_the_text_may_have(
    settings: dict[str, Any], former: int, fates: list[tuple[int, int]], most: int, expected: int
):
    assert next_len(DraftLengthConfig(**settings), former, fates, most) == expected


def test_all_conditions_of_a_rule_must_hold():
    rule = DraftLengthOverride(load_from=8, class_="throughput", task="code")
    assert applies(rule, "throughput", "code", 8)
    assert not applies(rule, "throughput", "code", 7)
    assert not applies(rule, "interactive", "code", 8)
    assert not applies(rule, "throughput", "default", 8)
    assert applies(DraftLengthOverride(), "", "default", 1)
