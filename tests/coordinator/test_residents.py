"""Drafters inside a target, as the coordinator sees them: asked, waited for, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from cluster.core import Commit, Completion, Proposal, VerifyItem
from cluster.messages import DraftReport, ProposalFrame, Refusal, VerdictFrame, VerifyFrame
from cluster.rpc.link import Link
from cluster.rpc.memory import memory_pair
from cluster.token_log import prefix_hash
from tests.support.coordinator.house import GREEDY, House, collect, house, request, text_of
from tests.support.coordinator.toys import (
    Grow,
    ToyDrafter,
    ToyTarget,
    oracle_chain,
    plain_text,
    target_description,
)


@dataclass
class Host(ToyTarget):
    """A toy target with the resident `a`, which drafts `grow(context)` where nodes are asked for.

    tells: whether it ever says what it drafted.
    """

    grow: Grow = field(default_factory=oracle_chain)
    tells: bool = True
    spoil: Callable[[Proposal], Proposal] = lambda proposal: proposal
    refusal: Refusal | None = None
    verdicts: list[VerdictFrame] = field(default_factory=list)

    async def serve(self, link: Link[VerdictFrame, VerifyFrame]) -> None:
        async for frame in link:
            self.frames.append(frame)
            self.arrived.set()
            answer = self.answer(frame)
            self.verdicts.append(answer)
            await link.send(answer)
            asked = {item.request_id: item for item in frame.items if item.draft_nodes}
            if asked and self.tells:
                await link.send(VerdictFrame(drafts=self._report(asked)))

    def _report(self, asked: dict[str, VerifyItem]) -> DraftReport:
        proposals: list[Proposal] = []
        completions: list[Completion] = []
        for item in asked.values():
            drawn = [
                verdict.token_ids[-1:].tolist()
                for verdict in self.verdicts[-1].verdicts
                if verdict.request_id == item.request_id
            ]
            if not drawn:
                continue
            context = self.contexts[item.request_id] + drawn[0]
            params = self.params[item.request_id]
            opened = Commit("", 0, 0, 0, item.delta, item.prompt_len, 0, params=params)
            tree = self.grow(context, opened)
            proposal = Proposal(
                item.request_id, item.generation, len(context), prefix_hash(context), tree,
                np.full(len(tree), 0.9, np.float32), "a", True,
            )  # fmt: skip
            proposals.append(self.spoil(proposal))
            completions.append(Completion(item.request_id, item.generation, len(context)))
        refusals = (self.refusal,) if self.refusal else ()
        frame = ProposalFrame(tuple(proposals), (), refusals, draft_time_s=0.001)
        num_nodes = sum(item.draft_nodes for item in asked.values())
        return DraftReport((("a", frame),), 0.001, len(asked), num_nodes)


def add(stage: House, host: Host) -> None:
    ours, theirs = memory_pair()
    stage.tasks.append(asyncio.create_task(host.serve(theirs)))
    description = replace(target_description("t"), residents=("a",))
    stage.coordinator.add_target("t", description, ours)


async def test_a_resident_is_asked_with_the_prompt_and_saves_steps() -> None:
    host = Host()
    async with house(drafters=("a",), budget="fixed") as stage:
        add(stage, host)
        events = await collect(stage.coordinator, request(task="code"))
        metrics = stage.coordinator.render_metrics().decode()
        assert stage.coordinator.status()["drafters"][0]["name"] == "a"
    assert text_of(events) == plain_text([1, 2, 3], GREEDY)
    (opening,) = host.frames[0].items
    assert (opening.task, opening.residents) == ("code", ("a",))
    assert opening.draft_nodes > 0
    assert len(host.frames[1].items[0].tree) > 0  # the batch has waited for the first trees
    assert 'drafthouse_drafter_up{drafter="a"} 1.0' in metrics
    assert 'drafthouse_draft_demand_nodes_total{drafter="a",task="code"}' in metrics
    assert 'drafthouse_draft_seconds_total{drafter="a"}' in metrics


class LateTimers:
    """Timers that go off when they are told to."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def __call__(self, delay_s: float, callback: Callable[[], None]) -> LateTimers:
        assert 0.05 <= delay_s < 1.0
        self.due.append(callback)
        return self

    def cancel(self) -> None:
        self.due.clear()


async def test_a_batch_waits_for_residents_no_longer_than_its_time() -> None:
    host, timers = Host(tells=False), LateTimers()
    async with house(drafters=("a",), timer=timers, budget="fixed") as stage:
        add(stage, host)
        running = asyncio.create_task(collect(stage.coordinator, request()))
        for num_frames in range(1, 6):
            await host.wait_for_frames(num_frames)
            await stage.settle()
            assert len(host.frames) == num_frames  # the next one waits
            timers.due.pop()()
        host.tells = True
        while timers.due:
            timers.due.pop()()
            await stage.settle()
        events = await running
    assert text_of(events) == plain_text([1, 2, 3], GREEDY)


async def test_rubbish_opens_the_breaker_and_the_text_goes_on(budget: str) -> None:
    host = Host(spoil=lambda each: replace(each, prefix_hash=each.prefix_hash ^ 1))
    async with house(drafters=("a",), budget=budget, breaker_reset_s=60.0) as stage:
        add(stage, host)
        events = await collect(stage.coordinator, request())
        metrics = stage.coordinator.render_metrics().decode()
        assert stage.coordinator.status()["drafters"][0]["breaker"] == "open"
    assert text_of(events) == plain_text([1, 2, 3], GREEDY)
    assert 'drafthouse_drafter_faults_total{drafter="a",why="rubbish"} 3.0' in metrics
    # It is asked for nothing any more.
    assert [item.draft_nodes for frame in host.frames[5:] for item in frame.items].count(0) > 20


async def test_the_residents_of_a_target_that_is_gone_are_gone_as_well() -> None:
    async with house(drafters=("a",)) as stage:
        add(stage, Host())
        await collect(stage.coordinator, request())
        stage.coordinator.remove_target("t")
        assert stage.coordinator.status()["drafters"] == []
        metrics = stage.coordinator.render_metrics().decode()
    assert 'drafthouse_drafter_up{drafter="a"} 0.0' in metrics
    assert 'drafthouse_drafter_requests{drafter="a"' not in metrics


async def test_a_drafter_of_the_pool_on_the_targets_cores_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with house(drafters=("shared", "apart")) as stage:
        stage.add_target(ToyTarget(devices=("host/cpu0",)))
        for replica in ("r0", "r1"):
            stage.add_drafter(ToyDrafter("shared", oracle_chain(), devices=("host/cpu0",)), replica)
        stage.add_drafter(ToyDrafter("apart", oracle_chain(), devices=("host/cpu1",)))
        stage.add_target(ToyTarget(devices=("host/cpu0",)), "target-1")
    warned = [record.message for record in caplog.records if "shares" in record.message]
    assert len(warned) == 1
    assert "name=shared" in warned[0]
