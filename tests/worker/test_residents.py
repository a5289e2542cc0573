"""Drafters inside the target worker: they save steps, cost bounded time, and change no text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.core import (
    EMPTY_TREE,
    DraftTask,
    Proposal,
    Request,
    SamplingParams,
    VerifyItem,
    token_array,
)
from cluster.draft.base import Drafter, DrafterContext
from cluster.draft.ngram_cache import NgramCacheDrafter, NgramCacheOptions
from cluster.draft.suffix import SuffixDrafter, SuffixOptions
from cluster.messages import VerdictFrame, VerifyFrame, WorkerDescription
from cluster.rpc.memory import memory_pair
from cluster.token_log import prefix_hash
from cluster.worker.residents import Residents
from cluster.worker.target import TargetWorker
from cluster.worker.verifier import Verifier
from tests.support.coordinator.house import GREEDY, SEEDED, collect, request, text_of
from tests.support.coordinator.toys import ToyDrafter, random_tree
from tests.support.worker.residents import (
    VOCAB_SIZE,
    GreedyOracle,
    Stage,
    hosted,
    join,
    resident,
    worker_of,
)
from tests.support.worker.toy_engine import ToyEngine, hashed_law

LAWS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])


def suffix() -> Drafter:
    return SuffixDrafter(DrafterContext("suffix", 16, 64), SuffixOptions())


def ngram() -> Drafter:
    return NgramCacheDrafter(DrafterContext("ngram", 16, 64), NgramCacheOptions())


def several(params: SamplingParams) -> list[Request]:
    return [
        request([i, i + 1, 7, i, i + 1], replace(params, max_tokens=20 + 7 * i), f"r{i}")
        for i in range(6)
    ]


async def texts_of(stage: Stage, requests: Sequence[Request]) -> list[list[int]]:
    found = await asyncio.gather(*(collect(stage.house.coordinator, each) for each in requests))
    return [text_of(events) for events in found]


async def plain(requests: Sequence[Request]) -> list[list[int]]:
    async with hosted({}) as stage:
        return await texts_of(stage, requests)


@LAWS
@pytest.mark.parametrize("budget", ["fixed", "adaptive"])
@pytest.mark.parametrize("cohorts", ["one", "two"])
async def test_residents_change_no_text(params: SamplingParams, cohorts: str, budget: str) -> None:
    requests = several(params)
    drafters = {"a": GreedyOracle(), "suffix": suffix(), "ngram": ngram()}
    async with hosted(drafters, budget=budget, cohorts=cohorts) as stage:
        texts = await texts_of(stage, requests)
    assert texts == await plain(requests)


@LAWS
async def test_residents_and_a_pool_together_change_no_text(params: SamplingParams) -> None:
    requests = several(params)
    async with hosted({"a": GreedyOracle(2)}, pool=("b",)) as stage:
        stage.house.add_drafter(ToyDrafter("b", random_tree(4)))
        texts = await texts_of(stage, requests)
        metrics = stage.house.coordinator.render_metrics().decode()
    assert texts == await plain(requests)
    for name in "ab":
        assert f'spec_decode_num_draft_tokens_total{{drafter="{name}",task="default"}}' in metrics


class LossyEngine(ToyEngine):
    """Answers two works a step, and loses the cache of one in five."""

    def __init__(self) -> None:
        super().__init__(hashed_law(VOCAB_SIZE), VOCAB_SIZE, works_per_step=2)
        self._random = np.random.default_rng(3)

    def step(self, taps: Sequence[int] = ()) -> list[Any]:
        for name in list(self.contexts):
            if self._random.random() < 0.2 and name not in self._queue:
                self.lose(name)
        return super().step()


@LAWS
async def test_a_text_is_right_where_the_target_loses_its_caches(params: SamplingParams) -> None:
    requests = several(params)
    oracle = GreedyOracle()
    async with hosted({"a": oracle}, LossyEngine()) as stage:
        texts = await texts_of(stage, requests)
        metrics = stage.house.coordinator.render_metrics().decode()
    assert texts == await plain(requests)
    assert "target_cache_misses_total 0.0" not in metrics
    assert oracle.tasks


async def test_a_short_answer_is_drafted_for_from_its_first_step() -> None:
    asked = request(params=replace(GREEDY, max_tokens=8))
    async with hosted({"a": GreedyOracle(16)}) as stage:
        events = await collect(stage.house.coordinator, asked)
    assert [text_of(events)] == await plain([asked])
    stats = events[-1].stats
    assert stats is not None
    # The prefill's token, and all others at once.
    assert stats.num_steps == 2
    assert stats.num_accepted_draft_tokens == 6


async def test_nobody_drafts_for_a_request_that_wants_no_speculation() -> None:
    oracle = GreedyOracle()
    async with hosted({"a": oracle}, max_draft_tokens=0) as stage:
        await collect(stage.house.coordinator, request())
    assert (oracle.commits, oracle.tasks) == ([], [])


async def test_only_the_drafters_of_a_task_are_asked() -> None:
    chosen, other = GreedyOracle(), GreedyOracle(name="b")
    asked = request(params=replace(GREEDY, max_tokens=8))
    asked = replace(asked, speculation=replace(asked.speculation, drafters=("a",)))
    async with hosted({"a": chosen, "b": other}) as stage:
        await collect(stage.house.coordinator, asked)
    assert chosen.tasks
    assert (other.commits, other.tasks) == ([], [])


async def test_what_a_drafter_holds_is_released_with_its_request() -> None:
    oracle = GreedyOracle()
    async with hosted({"a": oracle}) as stage:
        await collect(stage.house.coordinator, request())
        assert await asyncio.to_thread(oracle.has_released.wait, 20)
        assert stage.house.coordinator.status()["drafters"][0]["sessions"] == 0
        for _ in range(2000):  # the target says it in a frame of its own
            if requests_held(stage) == [0.0]:
                break
            await asyncio.sleep(0.01)
        assert requests_held(stage) == [0.0]
    assert len(oracle.requests) == 0


def requests_held(stage: Stage) -> list[float]:
    """The gauge of requests that drafters hold."""
    lines = stage.house.coordinator.render_metrics().decode().splitlines()
    return [
        float(line.split()[-1]) for line in lines if line.startswith("drafthouse_drafter_requests{")
    ]


class BlockingOracle(GreedyOracle):
    """Drafts when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.is_asked = threading.Event(), threading.Event()

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.is_asked.set()
        assert self.gate.wait(20)
        return super().propose(tasks)


async def test_the_verdicts_leave_before_anything_is_drafted() -> None:
    oracle = BlockingOracle()
    engine = ToyEngine(hashed_law(VOCAB_SIZE), VOCAB_SIZE)
    description = WorkerDescription("w", "target", "toy", residents=("a",))
    worker = TargetWorker(Verifier(engine), description, Residents([resident(oracle)]))
    worker.start()
    ours, theirs = memory_pair()
    serving = asyncio.create_task(worker.serve(theirs))
    prompt = [1, 2, 3]
    item = VerifyItem(
        "r", 1, 0, 0, token_array(prompt), EMPTY_TREE, 3, GREEDY, b"", 4, "default", ("a",)
    )
    try:
        async with asyncio.timeout(20):
            await ours.send(VerifyFrame((item,)))
            verdicts: VerdictFrame = await anext(ours)
            assert len(verdicts.verdicts) == 1  # while the drafter is not let draft
            oracle.gate.set()
            drafts: VerdictFrame = await anext(ours)
    finally:
        oracle.gate.set()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await asyncio.to_thread(worker.stop)
    assert drafts.drafts is not None
    assert (drafts.drafts.num_sequences, drafts.drafts.num_nodes) == (1, 4)
    ((name, frame),) = drafts.drafts.frames
    (proposal,) = frame.proposals
    context = prompt + verdicts.verdicts[0].token_ids.tolist()
    assert (name, proposal.request_id, proposal.base_len) == ("a", "r", len(context))
    assert proposal.prefix_hash == prefix_hash(context)
    assert proposal.is_complete


@LAWS
async def test_another_target_and_its_residents_take_over_in_mid_text(
    params: SamplingParams,
) -> None:
    asked = request(params=replace(params, max_tokens=150))
    first, second = BlockingOracle(), GreedyOracle()
    successor = worker_of({"a": second})
    successor.start()
    try:
        async with hosted({"a": first}) as stage:
            running = asyncio.create_task(collect(stage.house.coordinator, asked))
            assert await asyncio.to_thread(first.is_asked.wait, 20)
            stage.link.sever()
            join(stage.house, successor, "successor")
            first.gate.set()
            events = await running
    finally:
        first.gate.set()
        await asyncio.to_thread(successor.stop)
    assert [text_of(events)] == await plain([asked])
    assert second.commits[0].base_len == 0
    assert second.commits[0].params == asked.params
    assert second.tasks
