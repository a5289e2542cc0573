"""Drafters that decline, refuse, fill up or are of the wrong make."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import pytest

from cluster.core import Observation, SpeculationOptions, TokenTree
from cluster.errors import CapacityError, ProtocolError, RequestError, WorkerError
from cluster.messages import CommitFrame, ProposalFrame, Refusal, WorkerDescription
from cluster.rpc.link import memory_pair
from tests.support.coordinator.house import GREEDY, at_work, house
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    drafter_description,
    oracle_chain,
    oracle_in_a_crowd,
    target_description,
)

pytestmark = pytest.mark.usefixtures("budget")

LONGER = replace(GREEDY, max_tokens=150)


@dataclass
class DecliningDrafter(ToyDrafter):
    """Is full: keeps nothing of what it is sent."""

    def answer(self, frame: CommitFrame) -> ProposalFrame:
        return ProposalFrame(
            observations=tuple(Observation(c.request_id, c.generation, 0) for c in frame.commits)
        )


@dataclass
class RefusingDrafter(ToyDrafter):
    """Takes the request "kept" and refuses all others."""

    code: str = ""

    def answer(self, frame: CommitFrame) -> ProposalFrame:
        kept = tuple(commit for commit in frame.commits if commit.request_id == "kept")
        return replace(
            super().answer(replace(frame, commits=kept)),
            refusals=tuple(
                Refusal(c.request_id, c.generation, self.code, "no")
                for c in frame.commits
                if c not in kept
            ),
        )


@pytest.mark.parametrize(
    ("devices", "first_commit"),
    [((), 3), (("x/cpu1",), 3), (("x/cpu0", "x/cpu1"), 4)],
    ids=["unknown", "its own", "the target's"],
)
async def test_a_prompt_is_read_beside_the_target_unless_that_holds_it_up(
    devices: tuple[str, ...], first_commit: int
) -> None:
    async with house() as stage:
        stage.add_target(ToyTarget(devices=("x/cpu0",)))
        drafter = ToyDrafter("a", oracle_chain(4), devices=devices)
        stage.add_drafter(drafter)
        events = await stage.ask(prompt=[1, 2, 3])
        opened = drafter.commits[0]
        assert (opened.base_len, len(opened.token_ids)) == (0, first_commit)
        assert events[-1].stats.num_draft_tokens > 0


async def test_a_drafter_learns_whose_text_it_is_with_the_first_commit() -> None:
    drafter = ToyDrafter("a", oracle_chain(4))
    async with at_work(drafter) as stage:
        await stage.ask(tenant=b"theirs")
        commits = drafter.commits
        assert len(commits) > 1
        for commit in commits:
            assert commit.tenant == (b"theirs" if commit.params is not None else b"")


async def test_a_drafter_that_declines_is_not_sent_the_text_again_and_again() -> None:
    drafter = DecliningDrafter("a", oracle_chain())
    async with at_work(drafter) as stage:
        await stage.ask(params=LONGER)
        await stage.settle()
        assert sum(len(frame.commits) for frame in drafter.frames) <= 3
        assert stage.status()["drafters"][0]["breaker"] == "closed"


async def test_a_request_that_a_drafter_cannot_serve_is_not_its_fault() -> None:
    drafter = RefusingDrafter("a", oracle_chain(), code=RequestError.code)
    async with at_work(drafter) as stage:
        for index in range(5):
            await stage.ask(id=f"r{index}")
        status = stage.status()
        assert (status["faults"], status["left_alone"]) == ({}, [])
        assert status["drafters"][0]["breaker"] == "closed"
        assert sum(len(frame.commits) for frame in drafter.frames) <= 3 * 5


async def test_a_full_drafter_refuses_what_is_new_and_keeps_what_it_has() -> None:
    async with house(breaker_failures=1) as stage:
        target = ToyTarget()
        stage.add_target(target)
        drafter = RefusingDrafter("a", oracle_in_a_crowd(3), code=CapacityError.code)
        stage.add_drafter(drafter)
        first = stage.begin(id="kept", params=LONGER)
        await target.wait_for_steps(4)
        short = replace(GREEDY, max_tokens=10)
        await stage.ask(id="new", params=short)
        assert stage.status()["drafters"][0]["breaker"] == "closed"
        assert not first.done()
        assert "kept" not in drafter.released
        assert (await first)[-1].finish_reason == "length"


async def test_a_request_that_a_drafter_fails_on_is_not_sent_to_it_again_and_again() -> None:
    async with house(breaker_failures=3, breaker_reset_s=60.0) as stage:
        target = ToyTarget()
        stage.add_target(target)
        drafter = RefusingDrafter("a", oracle_in_a_crowd(3), code=WorkerError.code)
        stage.add_drafter(drafter)
        await asyncio.gather(*(stage.ask(id=name, params=LONGER) for name in ("kept", "bad")))
        sent = [c for c in drafter.commits if c.request_id == "bad"]
        assert len(sent) <= 3
        assert {commit.base_len for commit in sent[:1]} == {0}
        metrics = stage.metrics()
        assert 'drafthouse_drafter_faults_total{drafter="a",why="refused"} 1.0' in metrics


async def test_a_lost_workers_gauges_go_with_it() -> None:
    async with house() as stage:
        target_link = stage.add_target(ToyTarget(), "gone-target")
        drafter_link = stage.add_drafter(ToyDrafter("a", oracle_chain()), "gone-drafter")
        await stage.ask()
        before = stage.metrics()
        assert 'worker="gone-target"' in before
        assert 'worker="gone-drafter"' in before
        target_link.sever()
        drafter_link.sever()
        await stage.settle(20)
        after = stage.metrics()
        assert 'worker="gone-target"' not in after
        assert 'worker="gone-drafter"' not in after
        assert "drafthouse_target_up 0.0" in after
        assert 'drafthouse_drafter_up{drafter="a"} 0.0' in after


async def test_a_drafter_that_does_not_fit_is_refused_loudly() -> None:
    async with at_work() as stage:
        ours, _ = memory_pair()
        wrong: WorkerDescription = replace(drafter_description("a"), tokenizer_hash="other")
        with pytest.raises(ProtocolError) as caught:
            stage.coordinator.add_drafter("a", "r0", wrong, ours)
        assert stage.status()["refused"] == {"a": caught.value.message}
        options = SpeculationOptions(drafters=("a",))
        events = await stage.ask(speculation=options)
        assert events[-1].stats.idle_because == "no_drafter_for_model"
        stage.add_drafter(ToyDrafter("a", oracle_chain()))
        assert stage.status()["refused"] == {}
        events = await stage.ask(speculation=options)
        assert events[-1].stats.idle_because == ""


async def test_a_drafter_without_a_tokenizer_must_have_the_targets_vocabulary() -> None:
    target = ToyTarget()
    async with house() as stage:
        stage.add_target(target)
        ours, _ = memory_pair()
        size = target.describe().vocab_size
        wrong = replace(drafter_description("a"), tokenizer_hash="", vocab_size=size + 1)
        with pytest.raises(ProtocolError, match=f"{size + 1} tokens, the target {size}"):
            stage.coordinator.add_drafter("a", "r0", wrong, ours)


async def test_the_first_target_decides_which_drafters_fit() -> None:
    async with house() as stage:
        ours, theirs = memory_pair()
        stage.tasks.append(asyncio.create_task(ToyDrafter("a", oracle_chain()).serve(theirs)))
        wrong = replace(drafter_description("a"), tokenizer_hash="other")
        joined = stage.coordinator.add_drafter("a", "r0", wrong, ours)
        stage.add_target(ToyTarget())
        await asyncio.wait({joined})
        assert stage.status()["drafters"] == []
        assert "tokenizer other" in stage.status()["refused"]["a"]


async def test_a_target_with_another_model_is_refused_beside_the_first() -> None:
    async with house() as stage:
        stage.add_target(ToyTarget(), "one")
        ours, _ = memory_pair()
        with pytest.raises(ProtocolError, match="model_hash"):
            stage.coordinator.add_target(
                "two", replace(target_description("two"), model_hash="other"), ours
            )


async def test_a_request_that_brings_down_every_target_ends_with_an_error() -> None:
    async with house(drafters=()) as stage:
        running = stage.begin(error=WorkerError.code)
        for life in range(8):
            if running.done():
                break
            toy = ToyTarget()
            toy.gate.clear()
            link = stage.add_target(toy, f"t{life}")
            await toy.wait_for_frames(1)
            link.sever()
            await stage.settle(20)
        await running


async def test_stopping_cancels_what_runs() -> None:
    async with house(drafters=()) as stage:
        target = ToyTarget()
        stage.add_target(target)
        running = stage.begin(params=replace(GREEDY, max_tokens=4000))
        await target.wait_for_steps(5)
        await stage.coordinator.stop()
        events = await running
        assert events[-1].finish_reason == "cancelled"
        await stage.settle(60)
        assert target.contexts == {}


async def test_replicas_that_came_and_went_are_forgotten_in_time() -> None:
    async with house(breaker_reset_s=5.0) as stage:
        for life in range(6):
            stage.clock.now += 40.0
            link = stage.add_drafter(ToyDrafter("a", oracle_chain()), f"life-{life}")
            link.sever()
            await stage.settle(20)
        assert [replica_id for _, replica_id, _ in stage.coordinator._pool.breakers] == [
            "life-4",
            "life-5",
        ]


async def test_every_tree_is_looked_at_before_anything_uses_it() -> None:
    """The first of two proposals in a frame is unsound, and overtaken by the other at once."""

    class Hasty(ToyDrafter):
        def answer(self, frame: CommitFrame) -> ProposalFrame:
            answer = super().answer(frame)
            unsound = tuple(
                replace(proposal, tree=TokenTree.chain([99] * len(proposal.tree)))
                for proposal in answer.proposals
            )
            return replace(answer, proposals=(*unsound, *answer.proposals))

    drafter = Hasty("a", oracle_chain())
    async with at_work(drafter, breaker_failures=1000) as stage:
        events = await stage.ask()
        assert events[-1].stats.num_accepted_draft_tokens > 0
        await stage.settle()
        num_frames = sum(bool(frame.commits) for frame in drafter.frames)
        rubbish = f'drafter_faults_total{{drafter="a",why="rubbish"}} {num_frames:.1f}'
        assert rubbish in stage.metrics()


async def test_a_drafter_with_another_model_is_scored_anew_and_finds_its_score_again() -> None:
    async with at_work() as stage:

        async def trees_with(model_hash: str) -> float:
            """Those scored of the replica with this model, after one more text."""
            stage.add_drafter(ToyDrafter("a", oracle_chain(4), model_hash=model_hash))
            await stage.ask(params=LONGER)
            await stage.settle()
            (row,) = stage.status()["scores"]
            assert row["version"] == f"a@{model_hash}"
            return float(row["trees"])

        first = await trees_with("one")
        other = await trees_with("two")
        assert 0 < other < 2 * first
        assert await trees_with("one") > first
