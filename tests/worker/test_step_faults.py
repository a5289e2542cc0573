"""Engines that lose, refuse and raise: the same text, and only who is guilty is refused."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster import metrics
from cluster.core import SamplingParams, TokenTree
from cluster.engine.loading.model import LoadedModel
from cluster.engine.paths import StepInputs, StepOutputs
from cluster.engine.work import Output, Work
from cluster.errors import RequestError, WorkerError
from cluster.rpc.messages import TextName
from tests.support.engine.driver import load_engine
from tests.support.engine.integrity import check_integrity
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import Desk, desk_of, steps, written
from tests.support.worker.texts import GREEDY, LAWS, PROMPT, opened, plain, pool_tree
from tests.support.worker.toy_engine import ToyEngine

pytestmark = pytest.mark.usefixtures("whole_lines")


class FragileEngine(ToyEngine):
    """Raises what `failures` holds, one per step, and whenever `is_poison` says so of a work."""

    def __init__(self, is_poison: Callable[[Work], bool] = lambda work: False) -> None:
        super().__init__()
        self.is_poison = is_poison
        self.failures = []
        self.works = []

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        self.works.append([name.split("/")[1] for name in self._queue])
        if self.failures:
            raise self.failures.pop(0)
        if any(self.is_poison(work) for work in self._queue.values()):
            raise ValueError("poison, and what stands in a prompt")
        return super().step()


def begins_with(*token_ids: int) -> Callable[[Work], bool]:
    """Works that bring a context that begins with these."""
    return lambda work: work.base_len == 0 and work.delta.tolist()[: len(token_ids)] == [*token_ids]


def codes(desk: Desk, name: str) -> list[str]:
    return [refusal.code for refusal in desk.refusals[name]]


class LossyEngine(ToyEngine):
    """Answers two works a step, and loses the cache of one text in five."""

    def __init__(self) -> None:
        super().__init__(works_per_step=2)
        self._random = np.random.default_rng(3)
        self.num_lost = 0

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        for name in list(self.contexts):
            if self._random.random() < 0.2:
                self.lose(name)
                self.num_lost += 1
        return super().step()


@LAWS
@pytest.mark.parametrize("length", [0, 4], ids=["alone", "with drafts"])
async def test_what_the_engine_loses_is_filled_in_again_and_the_text_is_the_same(
    length: int, params: SamplingParams
):
    engine = LossyEngine()
    desk = await written(
        *(opened(f"r{i}", [i, 7], params, drafters=("a",)) for i in range(5)),
        engine=engine,
        residents=[resident(GreedyOracle(length))],
    )
    misses = sum(desk.target.told(metrics.CACHE_MISSES).values())
    assert [desk.text(f"r{i}") for i in range(5)] == [plain([i, 7], params) for i in range(5)]
    assert not any(desk.refusals.values())
    assert engine.num_lost > 10
    assert 0 < misses <= engine.num_lost


class UselessEngine(ToyEngine):
    def _evaluate(self, work: Work) -> Output:
        return Output(work.request_id, have_len=0)


async def test_a_text_that_the_engine_never_takes_in_is_refused_and_tried_elsewhere():
    desk = await written(opened(), engine=UselessEngine())
    assert desk.num_steps == 17
    assert codes(desk, "r") == [WorkerError.code]
    assert len(desk.target.texts) == 0


async def test_a_step_that_raises_is_run_again_one_by_one_and_only_the_guilty_one_is_refused():
    engine = FragileEngine(begins_with(6, 6, 6))
    async with steps(engine) as target:
        desk, other = target.connect(), target.connect()
        other.post(opened("old", [3, 4]))
        for _ in range(3):
            await target.turn()
        desk.post(opened("good", [5, 6]), opened("bad", [6, 6, 6]))
        for _ in range(7):
            await target.turn()
        engine.is_poison = lambda work: False
        desk.post(opened("bad", [6, 6, 6], generation=2))
        await target.run()
        assert target.loop.texts.broken is None
    assert codes(desk, "bad") == [WorkerError.code]
    assert "prompt" not in desk.refusals["bad"][0].message
    assert desk.text("bad") == plain([6, 6, 6])
    assert desk.text("good") == plain([5, 6])
    assert other.text("old") == plain([3, 4])
    # One more step of the old one had run ahead.
    assert engine.works[4:8] == [["old", "good", "bad"], ["old"], ["good"], ["bad"]]
    assert engine.works[8] == ["old", "good"]
    # Suspected, it runs alone, once the step of the others that runs already is over.
    assert ["bad"] in engine.works[9:13]
    assert engine.contexts == {}


async def test_a_tree_that_makes_the_step_raise_costs_no_text():
    engine = FragileEngine(lambda work: len(work.tree) == 3)
    text = plain()
    async with desk_of(opened(drafters=("p",)), opened("other", [7, 8]), engine=engine) as desk:
        await desk.turn()
        tree = TokenTree.chain(text[1:4])
        desk.post(trees=[pool_tree([*PROMPT, *text[:1]], tree)])
        await desk.run()
    assert desk.text() == text
    assert desk.text("other") == plain([7, 8])
    assert not any(desk.refusals.values())
    assert all(verdict.num_nodes == 0 for verdict in desk.verdicts["r"])


async def test_a_text_that_raised_alone_begins_alone_where_it_comes_again():
    """Nobody else is run again for it a second time."""
    engine = FragileEngine(begins_with(6, 6))
    async with desk_of(opened("bad", [6, 6]), engine=engine) as desk:
        await desk.run()
        desk.post(opened("good", [5, 6]))
        await desk.turn()
        desk.post(opened("bad", [6, 6], generation=2))
        await desk.run()
        assert desk.target.loop.texts.broken is None
    assert codes(desk, "bad") == [WorkerError.code] * 2
    assert desk.text("good") == plain([5, 6])
    assert not any({"bad", "good"} <= set(works) for works in engine.works)


async def test_three_guilty_ones_with_no_good_step_between_break_the_engine():
    engine = FragileEngine(lambda work: True)
    async with steps(engine) as target:
        desk, idle = target.connect(), target.connect()
        for number in range(4):
            desk.post(opened(f"r{number}"))
            await target.turn()
            assert (target.loop.texts.broken is not None) == (number >= 2)
        assert not target.loop.has_work
        for each in (desk, idle):
            await asyncio.wait_for(each.sending, 20)
        assert "engine is broken: ValueError" in str(target.loop.texts.broken)
    assert codes(desk, "r0") == codes(desk, "r1") == [WorkerError.code]


async def test_guilty_ones_with_good_steps_between_them_break_nothing():
    engine = FragileEngine(begins_with(6, 6))
    async with desk_of(engine=engine) as desk:
        for number in range(6):
            desk.post(opened(f"bad{number}", [6, 6]))
            await desk.run()
            desk.post(opened(f"good{number}", params=replace(GREEDY, max_tokens=1)))
            await desk.run()
        assert desk.target.loop.texts.broken is None
    assert all(codes(desk, f"bad{number}") == [WorkerError.code] for number in range(6))


@pytest.mark.parametrize("error", [WorkerError("a rank is gone"), torch.AcceleratorError("lost")])
async def test_an_engine_that_says_itself_that_it_is_lost_is_broken_at_once(
    error: Exception,
):
    engine = FragileEngine()
    engine.failures.append(error)
    async with desk_of(opened(), engine=engine) as desk:
        await desk.turn()
        await asyncio.wait_for(desk.sending, 20)
        assert desk.target.loop.texts.broken is not None
        assert not desk.target.loop.has_work


class FullEngine(ToyEngine):
    """Has no page for any work."""

    has_pending = False


async def test_a_suspect_that_waits_for_one_without_pages_keeps_no_core_busy():
    async with desk_of(opened(), opened("s"), engine=FullEngine()) as desk:
        await desk.turn()
        desk.target.texts.contain(ValueError())
        assert await desk.run() == 1


class NarrowEngine(ToyEngine):
    """Has no room for drafts, and takes it for a mistake of the request."""

    def _evaluate(self, work: Work) -> Output:
        if len(work.tree):
            return Output(work.request_id, error=RequestError("too many rows"))
        return super()._evaluate(work)


async def test_drafts_that_are_too_much_for_the_engine_cost_no_text():
    desk = await written(
        opened(drafters=("a",)), engine=NarrowEngine(), residents=[resident(GreedyOracle())]
    )
    assert desk.text() == plain()
    assert not desk.refusals["r"]


async def test_a_context_that_is_too_long_for_the_engine_is_refused_by_itself():
    engine = ToyEngine(max_context_len=20)
    desk = await written(opened("long", range(21)), opened("short"), engine=engine)
    assert codes(desk, "long") == [RequestError.code]
    assert "too long" in desk.refusals["long"][0].message
    assert codes(desk, "short") == [RequestError.code]  # as soon as it is
    assert desk.text("short") == plain()[:18]


async def test_a_cancel_during_its_own_trial_lets_the_others_go_on():
    engine = FragileEngine()
    async with desk_of(opened(), opened("s", [4, 5]), engine=engine) as desk:
        await desk.turn()
        engine.failures.append(ValueError("out of luck"))
        await desk.turn()
        desk.post(cancels=[TextName("r", 1)])
        await desk.run()
    assert len(desk.text("r")) == 1
    assert desk.text("s") == plain([4, 5])


@pytest.mark.parametrize("num_failures", [1, 3])
async def test_a_step_for_want_of_memory_costs_speed_and_no_text(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
):
    """Where the model's forward cannot have what several texts need at a time."""
    engine = load_engine(llama_folder)
    prompts = {f"r{number}": [5, 6, 7 + number] for number in range(3)}
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12)
    opens = [opened(name, token_ids, params) for name, token_ids in prompts.items()]
    expected = await written(*opens, engine=engine)
    forward, failures = LoadedModel.forward, iter(range(num_failures))

    def scarce(model: LoadedModel, inputs: StepInputs) -> StepOutputs:
        if len(inputs.logit_rows) > 1 and next(failures, None) is not None:
            raise torch.OutOfMemoryError("none is left")
        return forward(model, inputs)

    monkeypatch.setattr(LoadedModel, "forward", scarce)
    found = await written(*opens, engine=engine)
    assert next(failures, None) is None
    assert {name: found.text(name) for name in prompts} == {
        name: expected.text(name) for name in prompts
    }
    assert found.num_steps > expected.num_steps
    check_integrity(engine)
