"""Steps without drafts: what they go by while nothing changes, and what ends that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster.config.schema import CoordinatorConfig
from cluster.plan.in_flight import Moment
from cluster.plan.step_choice import StepChoice
from cluster.plan.texts import Resident, Text
from cluster.requests.fields import PlainWhy
from cluster.spec.token_log import TokenLog
from tests.support.choices import by_day
from tests.support.plan.played import GROUP, LM, STEP_S, SUFFIX, Played

OTHER = Resident(2, "other", False)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of steps so far that were chosen at present prices."""
    made: list[StepChoice] = []
    begin = StepChoice.__init__

    def counted(own: StepChoice, *given: Any) -> None:
        made.append(own)
        begin(own, *given)

    monkeypatch.setattr(StepChoice, "__init__", counted)
    return lambda: len(made)


def test_where_no_drafts_pay_most_steps_go_by_a_former_plan(choices: Callable[[], int]) -> None:
    played = Played()
    played.run(200, draft_s=5 * STEP_S)
    before = choices()
    played.run(400, draft_s=5 * STEP_S)
    assert choices() - before < 400 / 6
    later = played.run(by_day(2_000, 20_000), draft_s=5 * STEP_S)
    assert any(plan.ask.num_nodes for plan in later), "models are still tried"


def test_another_text_or_a_prompt_beside_it_is_planned_for_at_once(
    choices: Callable[[], int],
) -> None:
    played = Played()
    played.run(200, draft_s=5 * STEP_S)
    other = Text("other", GROUP, TokenLog(played.text.tokens.since(0)))
    other.names, other.max_draft_tokens = ("lm",), 8
    for texts, rows, most in (
        ([played.text, other], 0, None),
        ([played.text], 16, None),
        ([played.text], 0, None),
        ([played.text], 0, 4),
    ):
        before = choices()
        moment = Moment(played.now, (LM,), rows)
        played.controller.plan(texts, [100] * len(texts), most, moment)
        assert choices() == before + 1


def test_a_setting_or_a_cap_that_allows_nothing_for_a_while_ends_it(
    choices: Callable[[], int],
) -> None:
    played = Played()
    played.run(200, draft_s=5 * STEP_S)
    played.plan()
    before = choices()
    played.controller.use(CoordinatorConfig(max_draft_tokens=8))
    played.plan()
    assert choices() == before + 1
    for most in (0, 8):
        played.text.max_draft_tokens = most
        played.plan()
    assert choices() == before + 2


def test_once_the_guard_allows_drafts_they_are_asked_for_in_the_next_step(
    choices: Callable[[], int],
) -> None:
    played = Played()
    assert played.run(100)[-1].ask.num_nodes
    guard = played.controller.target.loads[False, 1].guard
    guard.settle(1.0, STEP_S, STEP_S)  # so much is lost that no drafts may be tried
    before = choices()
    assert not any(plan.ask.num_nodes for plan in played.run(40)[1:])
    assert choices() - before < 40 / 6
    assert {plan.why for plan in played.run(4)} == {PlainWhy.GUARD}
    guard.settle(0.0, 1.0, STEP_S)
    assert played.round().ask.num_nodes


def test_residents_that_no_text_of_the_batch_may_ask_are_not_weighed() -> None:
    text = Played().text
    moment = Moment(0.0, (SUFFIX, LM, OTHER))
    assert moment.among([text]).residents == (SUFFIX, LM)
    other = Text("other", GROUP, text.tokens)
    other.names = ("other",)
    assert moment.among([text, other]) is moment
    text.resting = frozenset(("lm",))
    assert moment.among([text]).residents == (SUFFIX,)
