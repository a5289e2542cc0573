"""Drafters inside the target worker: they save steps, cost bounded time, and change no text."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster import metrics
from cluster.config.schema import Config
from cluster.core import SamplingParams
from cluster.draft.base import Drafter, DrafterContext
from cluster.draft.suffix import NgramCacheOptions, SuffixDrafter, SuffixOptions
from cluster.messages import Open
from cluster.models.fingerprint import NO_MODEL, ModelVersion
from cluster.worker.priority import freeze_gc
from cluster.worker.residents import Residents
from cluster.worker.target import ConfiguredTarget
from tests.support.worker.residents import LONG_STEP, GreedyOracle, resident, resident_text
from tests.support.worker.stage import NOBODY, parts_around, stage, worker_of
from tests.support.worker.steps import desk_of, steps, written
from tests.support.worker.texts import GREEDY, LAWS, opened, plain
from tests.support.worker.toy_engine import ToyEngine


def suffix() -> Drafter:
    return SuffixDrafter(DrafterContext("suffix", 16, 64), SuffixOptions())


def ngram() -> Drafter:
    return SuffixDrafter(DrafterContext("ngram", 16, 64), NgramCacheOptions())


def several(params: SamplingParams, *names: str) -> list[Open]:
    """Texts of many lengths, for these drafters."""
    return [
        opened(
            f"r{i}",
            [i, i + 1, 7, i, i + 1],
            replace(params, max_tokens=20 + 7 * i),
            drafters=names,
        )
        for i in range(6)
    ]


def texts(opens: Sequence[Open]) -> list[list[int]]:
    """What they are without any drafter."""
    return [plain(each.token_ids.tolist(), each.params) for each in opens]


@LAWS
@pytest.mark.parametrize("budget", ["fixed", "adaptive"])
async def test_residents_change_no_text(params: SamplingParams, budget: str) -> None:
    opens = several(params, "a", "suffix", "ngram")
    drafters = {"a": GreedyOracle(), "suffix": suffix(), "ngram": ngram()}
    async with stage(worker_of(drafters, budget=budget)) as built:
        assert await built.connect().written(*opens) == texts(opens)


async def test_a_short_answer_is_drafted_for_from_its_first_step() -> None:
    async with desk_of(
        opened(params=replace(GREEDY, max_tokens=8), drafters=("a",)),
        residents=[resident(GreedyOracle(16))],
    ) as desk:
        # The prompt's step brings a token, and the next one all others at once.
        assert await desk.run() == 2
    assert [len(verdict.sources) for verdict in desk.verdicts["r"]] == [0, 6]
    assert desk.text() == plain()[:8]


async def test_a_text_of_which_only_the_last_token_is_missing_is_not_drafted_for() -> None:
    oracle = GreedyOracle(16)
    desk = await written(
        opened(params=replace(GREEDY, max_tokens=2), drafters=("a",)), residents=[resident(oracle)]
    )
    assert desk.num_steps == 2
    assert oracle.tasks == []


async def test_nobody_drafts_for_a_text_that_wants_no_speculation() -> None:
    oracle = GreedyOracle()
    desk = await written(opened(drafters=("a",), max_draft_tokens=0), residents=[resident(oracle)])
    assert desk.text() == plain()
    assert (oracle.commits, oracle.tasks) == ([], [])


async def test_only_the_drafters_that_a_text_names_are_asked() -> None:
    chosen, other = GreedyOracle(), GreedyOracle(name="b")
    async with steps(residents=[resident(chosen), resident(other, "b")]) as target:
        target.connect().post(opened(drafters=("elsewhere", "a")))
        await target.run()
    assert chosen.tasks
    assert (other.commits, other.tasks) == ([], [])


async def test_nobody_drafts_for_an_output_that_is_given() -> None:
    oracle = GreedyOracle()
    params = SamplingParams(forced_ids=tuple(range(30)), max_tokens=30, logprobs=0)
    desk = await written(
        opened(params=params, drafters=("a",)), residents=[resident(oracle)], max_rows=16
    )
    assert desk.text() == list(range(30))
    assert oracle.tasks == []


async def test_what_a_drafter_holds_is_released_with_its_text() -> None:
    oracle = GreedyOracle()
    async with desk_of(
        opened(drafters=("a",)), opened("s", drafters=("a",)), residents=[resident(oracle)]
    ) as desk:
        await desk.turn()
        assert desk.target.told(metrics.DRAFTER_REQUESTS) == {("a", "w"): 2.0}
        await desk.run()
        assert desk.target.told(metrics.DRAFTER_REQUESTS) == {("a", "w"): 0.0}
    assert sorted(oracle.released) == ["1/r", "1/s"]
    assert len(oracle.requests) == 0


async def test_what_is_asked_of_residents_and_what_they_take_is_counted() -> None:
    async with steps(residents=[resident(GreedyOracle(2))]) as target:
        target.connect().post(opened(drafters=("a",), task="code"))
        await target.run()
        asked, took_s = target.told(metrics.DRAFT_DEMAND), target.told(metrics.DRAFT_TIME)
        assert target.told(metrics.DRAFT_DEMAND) == asked  # none is counted twice
    assert asked.keys() == {("a", "code")}
    assert asked["a", "code"] > 100
    assert took_s["a",] > 0.0


async def test_a_step_says_how_long_residents_drafted_before_it() -> None:
    desk = await written(opened(drafters=("a",)), residents=[resident(GreedyOracle(2))])
    reports = [frame.report for frame in desk.frames if frame.report is not None]
    assert reports[0].draft_time_s == 0.0
    assert all(0.0 < report.draft_time_s < report.period_s for report in reports[1:])


def test_a_drafter_that_another_one_replaces_frees_all_that_it_holds() -> None:
    former, later = GreedyOracle(), GreedyOracle()
    residents = Residents([resident(former)])
    residents.draft([resident_text(name="r"), resident_text(name="s")], LONG_STEP)
    held = resident(later)
    assert residents.exchange(held).name == "a"
    assert list(residents) == [held]
    assert sorted(former.released) == ["r", "s"]
    residents.draft([resident_text(name="r")], LONG_STEP)
    assert [each.request_id for each in later.tasks] == ["r"]


async def test_a_drafter_that_is_replaced_does_not_end_in_the_engines_thread() -> None:
    async with stage(worker_of({"a": GreedyOracle()})) as built:
        former = await asyncio.to_thread(built.worker.exchange, [resident(GreedyOracle())])
        assert await built.connect().written(opened(drafters=("a",))) == [plain()]
        held = weakref.ref(former.pop())
        assert held() is None  # nobody else has it


@pytest.mark.parametrize("model", [ModelVersion("a hash"), NO_MODEL], ids=["model", "look-up"])
async def test_a_model_that_is_replaced_is_freed_though_it_was_excluded_from_collections(
    model: ModelVersion,
) -> None:
    former = GreedyOracle()  # in a circle, as drafters with models are
    held = weakref.ref(former)
    residents = Residents([resident(former)])
    next(iter(residents)).model = model
    del former
    later = [resident(GreedyOracle())]
    worker = ConfiguredTarget(parts_around(ToyEngine(), residents), Config(), NOBODY)
    async with stage(worker):
        freeze_gc()
        try:
            await asyncio.to_thread(worker.use, Config(), later)
            # A collection stops the process: only a model is worth that.
            assert (held() is None) is (model != NO_MODEL)
        finally:
            gc.unfreeze()
