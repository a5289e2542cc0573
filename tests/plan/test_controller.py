"""The loop as a whole, fed by hand: what it plans, and what changes its mind."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.config.schema import CoordinatorConfig
from cluster.core import TokenTree, token_array
from cluster.plan.controller import Controller
from cluster.plan.in_flight import Moment, Round
from cluster.plan.step_choice import StepChoice
from cluster.plan.texts import HeldTree, Resident, Text
from cluster.requests.fields import PlainWhy
from cluster.spec.budget import SIZES, Ask, Prices, Recent
from cluster.spec.native.trees import Fate, Seen
from cluster.spec.step_profile import EDGES, DraftTime, StepProfile
from tests.support.choices import by_day
from tests.support.plan.played import CLAIMED, GROUP, LM, STEP_S, SUFFIX, Played, text_of
from tests.support.spec.in_loops import calibrated, first_steps

CHAIN = TokenTree.chain([1, 1, 1, 1])


class TwoKinds(Played):
    """A look-up knows the next token, and a model beside it the next four."""

    residents = (SUFFIX, LM)

    def draft(self, text: Text, ask: Ask) -> None:
        self.hold(text, "suffix", 1, is_look_up=True)
        if ask.with_models:
            super().draft(text, ask)

    def turns(self, ask: Ask, draft_s: float) -> list[DraftTime]:
        look_up = DraftTime(1, ask.num_nodes, "suffix", True, 0.0001)
        return [look_up, *(super().turns(ask, draft_s) if ask.with_models else ())]


def test_look_ups_draft_alone_where_a_model_takes_longer_than_it_brings():
    """They were asked together once, and where the model was too dear both fell silent."""
    played = TwoKinds()
    played.run(150, draft_s=5 * STEP_S)
    plans = played.run(200, draft_s=5 * STEP_S)
    asked = Counter(plan.ask.with_models for plan in plans if plan.ask.num_nodes)
    assert asked[False] > 0.9 * len(plans)
    assert asked[True] < 0.02 * len(plans)
    assert sum(plan.why is PlainWhy.NONE for plan in plans) > 0.9 * len(plans)


def test_a_model_drafts_beside_look_ups_where_it_brings_more_than_they():
    plans = TwoKinds().run(200, draft_s=0.2 * STEP_S)[100:]
    asked = Counter(plan.ask.with_models for plan in plans)
    assert asked[True] > 0.9 * len(plans)


def worth(controller: Controller, *, with_models: bool) -> float:
    """Tokens that a free tree of four nodes brings."""
    free = Prices(1.0, np.zeros(len(EDGES)), 1.0)
    known = controller.target.arms[False][with_models]
    return float(known.values(np.ones(1), free)[SIZES.index(4)])


def test_what_a_tree_of_a_model_is_worth_is_not_put_down_to_look_ups():
    played = TwoKinds()
    played.run(150, draft_s=0.2 * STEP_S)
    look_ups, models = (worth(played.controller, with_models=each) for each in (False, True))
    assert 0.5 < look_ups <= 1.0
    assert models > 1.5 * look_ups


def test_residents_that_are_right_draft_and_are_verified_in_nearly_every_round():
    plans = Played().run(150)
    verified = [plan for plan in plans if plan.why is PlainWhy.NONE]
    assert len(verified) > 0.95 * len(plans)
    asked = [plan for plan in plans[1:] if plan.ask.num_nodes]
    assert len(asked) > 0.97 * len(plans)


def test_a_step_beside_which_residents_drafted_is_no_plain_one():
    played = Played(depth=0)
    steps = played.controller.target.steps
    played.controller.learn(Round([played.text], [1], 0, STEP_S, 0.001))
    assert steps.num_recorded == 0
    played.controller.learn(Round([played.text], [1], 0, STEP_S))
    assert steps.num_recorded == 1
    for _ in range(400):
        played.controller.learn(Round([played.text], [1], 0, STEP_S))
    guard = played.controller.target.loads[False, 1].guard
    assert guard.max_extra_s(STEP_S) == pytest.approx(guard.slack_steps * STEP_S)


def test_what_models_read_first_is_no_drafting_and_counts_where_they_are_tried():
    played = Played()
    target = played.controller.target
    for time_s in (0.002, 0.052, 0.072):
        turn = DraftTime(1, 4, "lm", False, time_s, num_read=int(time_s > 0.01))
        played.controller.learn(Round([played.text], [1], 0, STEP_S, time_s, [turn]))
    assert target.drafting["lm"].times.num_recorded == 1
    assert target.drafting["lm"].read_s == pytest.approx(0.060)
    new = Played()  # where nobody knows yet how long it drafts
    new.controller.learn(Round([new.text], [1], 0, STEP_S, 0.052, [replace(turn, time_s=0.052)]))
    assert new.controller.target.drafting["lm"].read_s == pytest.approx(0.052)


def reading_tries(*, read_s: float) -> int:
    played = TwoKinds(depth=0)
    played.controller.target.drafting["lm"].read_s = read_s
    asks = []
    for _ in range(400):
        played.text._asked_lens.clear()  # another text each time
        asks.append(played.round(draft_s=2 * STEP_S).ask)
    assert any(ask.num_nodes and not ask.with_models for ask in asks[100:]), "look-ups are, alone"
    return sum(ask.with_models and ask.num_nodes > 0 for ask in asks)


def test_models_are_tried_less_often_on_texts_that_they_have_not_read():
    assert reading_tries(read_s=20 * STEP_S) < 0.7 * reading_tries(read_s=0.0)


def test_models_read_no_prompt_of_a_new_load_and_then_as_those_that_run():
    played = TwoKinds()
    played.controller.target.drafting["lm"].read_s = 0.020
    assert played.first_ask() == (8, {"suffix"})
    played.text.num_steps += 2
    played.run(100)
    assert "lm" in played.first_ask()[1]


def test_the_first_drafts_of_a_text_are_what_pays_and_no_try():
    played = TwoKinds(depth=0)
    for _ in range(200):
        plan = played.round(draft_s=5 * STEP_S)
        num_nodes, team = played.first_ask()
        assert not ("lm" in team and num_nodes)
        if plan.ask.num_nodes and plan.ask.with_models:
            break
    else:
        pytest.fail("models were never tried")
    played.controller.learn(Round([played.text], [1], 4, 100 * STEP_S))  # overdrawn
    assert played.first_ask()[0] == 0


DRAFT_TIMES = [DraftTime(1, 8, each.name, each.is_look_up, 0.001) for each in (SUFFIX, LM)]


def crowd(read_s: float) -> tuple[Controller, list[Text]]:
    """Sixteen texts of 100 tokens, which models have not read."""
    profile = StepProfile.of((1, 64), (STEP_S, STEP_S))
    reading = DraftTime(1, 8, "lm", False, 0.001 + read_s, num_read=1)
    controller = Controller(CoordinatorConfig(max_draft_tokens=8), profile, [*DRAFT_TIMES, reading])
    return controller, [text_of(str(place), length=100) for place in range(16)]


@pytest.mark.parametrize(("read_s", "most"), [(0.0001, 16), (0.005, 4), (0.5, 0)])
def test_models_read_no_more_of_a_crowd_at_once_than_may_be_lost(read_s: float, most: int):
    controller, texts = crowd(read_s)
    plan = controller.plan(texts, [100] * 16, None, Moment(0.0, residents=(LM,)))
    num_read = sum(text.is_read("lm") for text in texts)
    assert num_read <= most
    assert (num_read > 0) == (most > 0) == (plan.ask.num_nodes > 0)
    assert all(
        text.asked == {"lm"} if text.is_read("lm") else not text.asked for text in texts if most
    )


def test_drafts_for_a_part_of_a_crowd_tell_what_they_would_be_worth_for_all():
    values = []
    for read_s in (0.0001, 0.005):
        controller, texts = crowd(read_s)
        moment = Moment(0.0, residents=(LM,))
        controller.plan(texts, [100] * 16, None, moment)
        for text in texts:
            if text.is_read("lm"):
                text.held["lm"] = HeldTree(100, 100, CHAIN, CLAIMED, is_resident=True)
        controller.plan(texts, [100] * 16, None, moment)
        values.append(worth(controller, with_models=True))
    assert values[1] == pytest.approx(values[0], rel=0.2)
    assert values[0] > 1.0


def test_of_many_trees_those_that_were_not_are_looked_at_in_the_next_step():
    controller, texts = crowd(0.0)
    for text in texts:
        text.held = {name: HeldTree(100, 100, CHAIN, CLAIMED) for name in ("suffix", "lm")}
    for _ in range(2):
        controller.plan(texts, [100] * 16, None, Moment(0.0))
    assert all({each.drafter for each in text.seen} == {*text.held} for text in texts)


def test_what_brings_less_than_a_hundredth_of_a_plain_step_is_not_verified():
    played = Played()
    for survival, why in ((0.005, PlainWhy.NOT_WORTH_IT), (0.02, PlainWhy.NONE)):
        values = np.array([survival], np.float32)
        played.text.held["lm"] = HeldTree(1, 1, TokenTree.chain([1]), values, is_resident=True)
        assert played.plan().why is why


def test_a_token_of_a_text_that_is_fast_already_counts_for_less():
    played = Played()
    played.texts.append(text_of("fast"))
    played.texts[1].tokens_per_step = 4.0
    values = np.array([0.3], np.float32)
    for text in played.texts:
        text.held["lm"] = HeldTree(1, 1, TokenTree.chain([1]), values, is_resident=True)
    # Beside so many rows each further one takes time.
    plan = played.controller.plan(played.texts, [9, 9], None, Moment(0.0, prompt_rows=16))
    assert [len(each.tree) for each in plan.in_flight] == [1, 0]


def test_residents_that_are_wrong_cost_a_small_share_and_are_still_scored():
    played = Played(depth=0)
    played.run(300)
    plans = played.run(1000)
    drafted = sum(plan.ask.num_nodes > 0 for plan in plans)
    assert 0 < drafted < 0.1 * len(plans)


def test_drafts_that_were_wrong_for_long_are_verified_again_once_they_are_right():
    played = Played()
    for arm in played.controller.target.arms[False]:
        arm.kept = Recent(0.01, 20.0)
    assert all(played.verified(400)[-20:])


def test_drafts_that_pay_by_fours_and_not_alone_are_made_by_fours():
    """A model's first node takes nearly as long as its fourth: to have tried one tells nothing bad
    of four."""
    plans = Played().run(200, draft_s=1.2 * STEP_S)
    assert sum(plan.why is PlainWhy.NONE for plan in plans) > 0.8 * len(plans)


def test_a_fixed_budget_takes_all_that_it_may():
    plans = Played(depth=0, budget="fixed").run(50)
    assert all(plan.ask.num_nodes == 8 for plan in plans)
    assert all(len(plan.in_flight[0].tree) == 4 for plan in plans[1:])


def test_what_was_learned_outlives_a_restart():
    before = Played(depth=0)
    before.run(200)
    state = json.loads(json.dumps(before.controller.export()))
    after = Played(depth=0)
    after.controller = Controller(CoordinatorConfig(max_draft_tokens=8))
    after.controller.restore(state)
    learned, known = (
        [each.export() for each in played.controller.target.arms[False]]
        for played in (before, after)
    )
    assert known == learned
    assert after.controller.acceptance.table() == before.controller.acceptance.table() != []
    fresh = Played(depth=0)
    wasted = [sum(len(plan.in_flight[0].tree) for plan in each.run(20)) for each in (after, fresh)]
    assert wasted[0] < wasted[1]


def test_a_new_task_goes_by_what_a_drafter_is_worth_for_others():
    acceptance = Controller(CoordinatorConfig()).acceptance
    for _ in range(50):
        seen = Seen("lm", GROUP, 0, CHAIN, CLAIMED)
        acceptance.learn([Fate(seen, token_array([9, 9, 9, 9]), first_steps())])
    known = acceptance.known("lm", ("new", False)).calibrator
    assert calibrated(known, [0.9])[0] < 0.5
    assert calibrated(acceptance.known("lm", ("new", True)).calibrator, [0.9])[0] > 0.8


def test_dear_drafts_are_not_drafted_though_they_are_right():
    plans = Played().run(400, draft_s=5 * STEP_S)[100:]
    assert sum(plan.ask.num_nodes > 0 for plan in plans) < 20
    assert sum(plan.why is PlainWhy.NOT_WORTH_IT for plan in plans) > 0.9 * len(plans)


# Steps without drafts: what they go by while nothing changes, and what ends that.


OTHER = Resident("other", False)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of steps so far that were chosen at present prices."""
    made = []
    begin = StepChoice.__init__

    def counted(own: StepChoice, *given: Any) -> None:
        made.append(own)
        begin(own, *given)

    monkeypatch.setattr(StepChoice, "__init__", counted)
    return lambda: len(made)


def test_where_no_drafts_pay_most_steps_go_by_a_former_plan(choices: Callable[[], int]):
    played = Played()
    played.run(200, draft_s=5 * STEP_S)
    before = choices()
    played.run(400, draft_s=5 * STEP_S)
    assert choices() - before < 400 / 6
    later = played.run(by_day(2_000, 20_000), draft_s=5 * STEP_S)
    assert any(plan.ask.num_nodes for plan in later), "models are still tried"


def test_another_text_or_a_prompt_beside_it_is_planned_for_at_once(
    choices: Callable[[], int],
):
    played = Played()
    played.run(200, draft_s=5 * STEP_S)
    for texts, rows, most in (
        ([played.text, text_of("other")], 0, None),
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
):
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
):
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


def test_residents_that_no_text_of_the_batch_may_ask_are_not_weighed():
    text = Played().text
    moment = Moment(0.0, (SUFFIX, LM, OTHER))
    assert moment.among([text]).residents == (SUFFIX, LM)
    other = text_of("other")
    other.names = ("other",)
    assert moment.among([text, other]) is moment
    text.resting = frozenset(("lm",))
    assert moment.among([text]).residents == (SUFFIX,)
