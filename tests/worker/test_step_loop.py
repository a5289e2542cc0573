"""The target runs each text by itself, from its opening to its end."""

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from cluster.config.speculation import DraftLengthConfig, DraftLengthOverride
from cluster.core import FinishReason, SamplingParams, TokenArray, TokenTree
from cluster.engine.draw.batch import BatchDraws
from cluster.plan.controller import Controller
from cluster.plan.roster import DraftScores
from cluster.requests.fields import PlainWhy
from cluster.rpc.messages import Heartbeat, StepReport, TextName
from cluster.spec.step_profile import DraftTime
from cluster.worker.residents import Drafted
from cluster.worker.step_loop import Step
from tests.support.clock import FakeClock
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import Steps, desk_of, steps, written
from tests.support.worker.texts import GREEDY, LAWS, PROMPT, SEEDED, opened, plain, pool_tree
from tests.support.worker.toy_engine import ToyEngine

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@LAWS
async def test_a_text_runs_to_its_end_without_a_word_from_the_coordinator(
    params: SamplingParams,
):
    desk = await written(opened(params=params))
    assert desk.num_steps == params.max_tokens
    assert (desk.text(), desk.reason()) == (plain(params=params), LENGTH)
    assert desk.target.engine.contexts == {}
    assert len(desk.target.texts) == 0


@LAWS
@pytest.mark.parametrize("every", [1, 2, 3])
async def test_a_step_that_runs_ahead_with_another_token_than_was_drawn_has_no_part_in_the_text(
    params: SamplingParams, every: int, monkeypatch: pytest.MonkeyPatch
):
    counter, right = itertools.count(), BatchDraws.on_device.fget

    def on_device(draws: BatchDraws) -> TokenArray:
        return right(draws) - (next(counter) % every == 0)

    monkeypatch.setattr(BatchDraws, "on_device", property(on_device))
    desk = await written(opened(params=params))
    assert desk.text() == plain(params=params)
    # All of them began one, but the prompt's and the last two.
    assert next(counter) == params.max_tokens - 2


@pytest.mark.parametrize(("logprobs", "num_ahead"), [(None, GREEDY.max_tokens - 2), (0, 0)])
async def test_a_step_whose_rows_are_asked_for_more_than_draws_lets_none_run_ahead(
    logprobs: int | None, num_ahead: int
):
    desk = await written(opened(params=replace(GREEDY, logprobs=logprobs)))
    assert desk.target.engine.num_ahead == num_ahead


async def test_a_text_that_comes_while_a_step_runs_ahead_joins_the_one_behind_it():
    async with desk_of(opened()) as desk:
        for _ in range(3):
            await desk.turn()
        desk.post(opened("late"))
        for count in ((4, 0), (5, 1), (6, 2)):
            await desk.turn()
            assert count == tuple(len(desk.verdicts[name]) for name in ("r", "late"))
        assert desk.target.engine.num_ahead == 3


@LAWS
@pytest.mark.parametrize("num_written", [1, 7, 39])
async def test_a_text_goes_on_where_another_target_left_it(
    num_written: int, params: SamplingParams
):
    text = plain(params=params)
    desk = await written(opened(params=params, written=text[:num_written], generation=4))
    assert desk.text() == text[num_written:]
    assert desk.verdicts["r"][0].generation == 4


@pytest.mark.parametrize("length", [0, 4, 16], ids=["alone", "with drafts", "with long ones"])
async def test_the_limit_that_came_with_the_text_ends_it(length: int):
    desk = await written(
        opened(max_len=len(PROMPT) + 11, drafters=("a",)),
        residents=[resident(GreedyOracle(length))],
    )
    assert (desk.text(), desk.reason()) == (plain()[:11], LENGTH)
    # A path of k nodes brings k + 1 tokens: deeper ones could never be of use.
    limit = len(PROMPT) + 11
    assert all(each.num_nodes < limit - each.context_len for each in desk.verdicts["r"])


async def test_a_text_of_one_more_token_takes_one_step():
    desk = await written(opened(max_len=len(PROMPT) + 1))
    assert desk.num_steps == 1
    assert (desk.text(), desk.reason()) == (plain()[:1], LENGTH)


@pytest.mark.parametrize("max_rows", [512, 16])
async def test_a_given_output_is_scored_whole_and_nothing_in_it_ends_it(max_rows: int):
    forced = tuple(range(20))
    params = SamplingParams(
        temperature=0.0, max_tokens=20, forced_ids=forced, stop_token_ids=(3, 4), logprobs=1
    )
    desk = await written(opened(params=params, drafters=("a",)), max_rows=max_rows)
    assert (desk.text(), desk.reason()) == (list(forced), LENGTH)
    assert desk.num_steps == (1 if max_rows == 512 else 4)  # chunks of a quarter of the rows
    scores = [score for verdict in desk.verdicts["r"] for score in verdict.logprobs]
    assert len(scores) == 20
    assert all(score.logprob < 0.0 and len(score.top) == 1 for score in scores)
    assert all(verdict.num_nodes == 0 for verdict in desk.verdicts["r"])
    assert all(len(verdict.sources) == 0 for verdict in desk.verdicts["r"])


async def test_where_not_all_texts_fit_those_of_the_oldest_ones_kind_go_first():
    async with desk_of(max_rows=2) as desk:
        desk.post(
            opened("greedy"),
            opened("seeded", params=SEEDED),
            opened("other", params=SEEDED),
            opened("greedy too"),
        )
        await desk.turn()
        assert set(desk.verdicts) == {"greedy", "greedy too"}
        await desk.turn()
        assert set(desk.verdicts) == {"greedy", "greedy too", "seeded", "other"}, "nobody starves"
        await desk.run()
    texts = [desk.text(name) for name in ("greedy", "greedy too", "seeded", "other")]
    assert texts == [*[plain()] * 2, *[plain(params=SEEDED)] * 2]


async def test_a_coordinator_that_reads_nothing_has_its_texts_parked_and_others_go_on():
    params = replace(GREEDY, max_tokens=100)
    async with steps() as target:
        deaf, desk = target.connect(), target.connect()
        deaf.reads = False
        for each in (deaf, desk):
            each.post(opened(params=params))
        await target.run()
        assert desk.text() == plain(params=params)
        assert 60 <= len(deaf.text()) < 70
        deaf.stream.acknowledged = deaf.stream.serial
        deaf.reads = True
        assert target.loop.has_work
        await target.run()
    assert deaf.text() == plain(params=params)


async def test_a_cancel_and_an_opening_in_one_frame_end_the_former_text():
    async with desk_of(opened()) as desk:
        await desk.turn()
        desk.post(opened(prompt=[5, 5], generation=2), cancels=[TextName("r", 1)])
        await desk.run()
    assert [verdict.generation for verdict in desk.verdicts["r"]] == [1] + [2] * 40
    assert desk.verdicts["r"][-1].finish_reason is LENGTH


async def test_a_text_that_the_coordinators_heartbeat_does_not_name_is_freed():
    async with steps() as target:
        desk, other = target.connect(), target.connect()
        desk.post(opened("lost"), opened("kept"))
        other.post(opened("lost", [4, 4]))
        await target.turn()
        desk.post(heartbeat=Heartbeat((TextName("kept", 1), TextName("lost", 2))))
        await target.run()
    assert len(desk.text("lost")) == 1
    assert desk.text("kept") == plain()
    assert other.text("lost") == plain([4, 4])


async def test_a_coordinator_without_verdicts_is_told_too_what_each_step_took(
    monkeypatch: pytest.MonkeyPatch,
):
    clock, text, given = FakeClock(), plain(), defaultdict(list)

    def takes(owner: type, name: str, time_s: float) -> None:
        call = getattr(owner, name)

        def slow(own: object, *known: Any, **fields: Any) -> Any:
            clock.now += time_s
            given[name] += known
            return call(own, *known, **fields)

        monkeypatch.setattr(owner, name, slow)

    takes(ToyEngine, "step", 1.0)
    takes(GreedyOracle, "propose", 0.25)
    takes(DraftScores, "score", 0.125)
    takes(Controller, "learn", 0.0)
    drafter = resident(GreedyOracle(2), clock=clock)
    async with steps(residents=[drafter], clock=clock) as target:
        first, second = target.connect(), target.connect()
        second.post(opened(params=replace(GREEDY, stop_token_ids=(text[8],)), drafters=("a",)))
        await target.run()
    assert (second.text(), second.reason()) == (text[:8], STOP)
    assert first.stream.counts
    assert not second.stream.counts
    assert not any(frame.report for frame in second.frames)
    of_prompt = StepReport(1.0, 0.0, pages_total=1000, num_sequences=1, pages_in_use=1, num_rows=3)
    later = replace(of_prompt, period_s=1.375, draft_time_s=0.25, num_nodes=2, num_emitted_tokens=3)
    of_prompt = replace(of_prompt, num_prompt_tokens=3, num_emitted_tokens=1)
    told = [frame.report for frame in first.frames if frame.report]
    assert told == [of_prompt, *[later] * 3]
    # The stop token, which ends the last step, would have taken a plain one too.
    learned = [
        (each.num_tokens, each.num_nodes, each.step_time_s, each.draft_time_s)
        for each in given["learn"]
    ]
    drafted = ([3], 2, 1.125, 0.25)
    assert learned == [([], 0, None, 0.0), ([3], 2, 1.125, 0.0), drafted, ([2], *drafted[1:])]
    assert given["learn"][-1].turns == [DraftTime(1, 16, "a", False, 0.25)]
    assert [each.num_steps for each in given["learn"][-1].texts] == [4]


async def test_a_step_is_planned_with_the_rows_of_prompts_beside_it(
    monkeypatch: pytest.MonkeyPatch,
):
    rows, plan = [], Controller.plan
    monkeypatch.setattr(
        Controller, "plan", lambda *given: rows.append(given[-1].prompt_rows) or plan(*given)
    )
    async with desk_of(opened(), max_rows=100) as desk:
        await desk.turn()
        for length in (30, 200):
            desk.post(opened(str(length), [5] * length))
            await desk.turn()
    assert rows == [30, 98]


async def test_a_step_without_drafts_says_why():
    without = opened("has none", return_draft_trees=True)
    desk = await written(opened("wants none", max_draft_tokens=0), without)
    assert {each.why for each in desk.verdicts["wants none"]} == {PlainWhy.NONE}
    # The prompt's own step, and the one before the last token, could have had none.
    whys = [each.why for each in desk.verdicts["has none"]]
    assert whys == [PlainWhy.NONE, *[PlainWhy.NO_DRAFTS] * 38, PlainWhy.NONE]
    assert [each.step.why for each in desk.verdicts["has none"]] == ["", *["no_drafts"] * 38, ""]
    drafted = opened(drafters=("a",))
    desk = await written(drafted, residents=[resident(GreedyOracle())], budget="adaptive")
    assert desk.verdicts["r"][1].why is PlainWhy.UNMEASURED


@LAWS
async def test_a_pool_tree_is_verified_in_the_next_step_and_changes_no_text(
    params: SamplingParams,
):
    text = plain(params=params)
    async with desk_of(opened(params=params, drafters=("p", "q"))) as desk:
        await desk.turn()
        tree = TokenTree.of([*text[1:4], 0, 5], [-1, 0, 1, 2, -1])
        desk.post(trees=[pool_tree([*PROMPT, *text[:1]], tree, [1, 3, 2, 2, 1])])
        await desk.turn()
        verdict = desk.verdicts["r"][1]
        await desk.run()
    assert desk.text() == text
    expected = [1, 3, 2] if text[4] else [1, 3, 2, 2]
    assert verdict.sources.tolist() == expected
    assert verdict.num_nodes == 5
    assert verdict.verified == (3, 3)
    assert verdict.why is PlainWhy.NONE


def test_a_step_in_which_a_resident_stalled_tells_nothing_of_the_time_of_steps():
    assert Step(drafted=Drafted(stalled=True)).round([], StepReport(), 1.0).step_time_s is None


# Draft-length schedules in a target: steps stay below their caps, and no text depends on them.


async def num_nodes(
    target: Steps, *names: str, params: SamplingParams = GREEDY, **fields: Any
) -> list[list[int]]:
    """Write these texts; returns the nodes that each step verified, by text."""
    desk = target.connect()
    desk.post(*(opened(name, params=params, drafters=("a",), **fields) for name in names))
    await target.run()
    for name in names:
        assert desk.text(name) == plain(params=params)
    return [[verdict.num_nodes for verdict in desk.verdicts[name]] for name in names]


KINDS = {
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
):
    settings, most, first = KINDS[kind]
    schedule = DraftLengthConfig(kind=kind, **settings)  # type: ignore[arg-type]
    async with steps(
        residents=[resident(GreedyOracle(100))], budget=budget, draft_length=schedule
    ) as target:
        (nodes,) = await num_nodes(target, "r", params=params)
        (few,) = await num_nodes(target, "s", params=params, max_draft_tokens=1)
    assert max(few) <= 1
    assert max(nodes) <= most
    if budget == "fixed" and params.temperature == 0.0:
        assert nodes[: len(first)] == first


async def test_rules_go_by_the_class_the_task_and_the_load():
    rules = (
        DraftLengthOverride(class_="throughput", max_draft_tokens=3),
        DraftLengthOverride(task="code", max_draft_tokens=2),
        DraftLengthOverride(load_from=3, max_draft_tokens=1),
        DraftLengthOverride(class_="interactive"),
    )
    schedule = DraftLengthConfig(overrides=rules)
    async with steps(residents=[resident(GreedyOracle(100))], draft_length=schedule) as target:
        found = [
            *await num_nodes(target, "a"),
            *await num_nodes(target, "b", latency_class="throughput"),
            *await num_nodes(target, "c", task="code"),
            *await num_nodes(target, "d", "e", "f"),
            *await num_nodes(target, "g", latency_class="interactive"),
        ]
    assert [max(each) for each in found] == [16, 3, 2, 1, 1, 1, 0]
    last = target.desks[-1].verdicts["g"]
    assert {verdict.why for verdict in last[1:-1]} == {PlainWhy.SCHEDULE}
