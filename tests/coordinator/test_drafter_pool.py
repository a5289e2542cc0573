"""Drafters that decline, refuse, fill up or are of the wrong make, and what is told of faults."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.core import Observation, SpeculationOptions, TokenTree
from cluster.errors import CapacityError, ProtocolError, RequestError, WorkerError
from cluster.rpc.messages import CommitFrame, ProposalFrame, Refusal
from tests.support.coordinator.house import GREEDY, House, at_work, house
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    oracle_chain,
    oracle_in_a_crowd,
)

pytestmark = pytest.mark.usefixtures("budget")

LONGER = replace(GREEDY, max_tokens=150)


@dataclass
class DecliningDrafter(ToyDrafter):
    """Is full: keeps no more than so many tokens of what it is sent."""

    most: int = 0

    def answer(self, frame: CommitFrame) -> ProposalFrame:
        kept = (Observation(c.request_id, c.generation, self.most) for c in frame.commits)
        return ProposalFrame(observations=tuple(kept))


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
):
    drafter = ToyDrafter("a", oracle_chain(), devices=devices)
    async with at_work(ToyTarget(devices=("x/cpu0",)), drafter) as stage:
        events = await stage.ask()
        opened = drafter.commits[0]
        assert (opened.base_len, len(opened.token_ids)) == (0, first_commit)
        assert events[-1].stats.num_draft_tokens > 0


async def test_a_drafter_learns_whose_text_it_is_with_the_first_commit():
    drafter = ToyDrafter("a", oracle_chain())
    async with at_work(drafter) as stage:
        await stage.ask(tenant=b"theirs", task="code")
        assert len(drafter.commits) > 1
        for commit in drafter.commits:
            assert commit.tenant == (b"theirs" if commit.params is not None else b"")
            assert (commit.prompt_len, commit.max_nodes, commit.task) == (3, 64, "code")


@pytest.mark.parametrize(
    ("kind", "fields", "count"),
    [
        (DecliningDrafter, {}, 1),
        (DecliningDrafter, {"most": 1}, 10),
        (RefusingDrafter, {"code": RequestError.code}, 1),
    ],
)
async def test_a_request_that_a_drafter_cannot_serve_is_not_its_fault_nor_sent_again_and_again(
    kind: type[ToyDrafter], fields: dict[str, Any], count: int
):
    drafter = kind("a", oracle_chain(), **fields)  # type: ignore[arg-type]
    async with at_work(drafter) as stage:
        for index in range(5):
            await stage.ask(id=f"r{index}", params=LONGER)
        status = stage.status()
        assert (status["faults"], status["left_alone"]) == ({}, [])
        assert status["drafters"][0]["breaker"] == "closed"
        assert len(drafter.commits) == 5 * count


async def test_a_drafter_owes_no_answer_to_who_only_frees_its_texts():
    drafter = ToyDrafter("a", oracle_chain())
    async with at_work(drafter) as stage:
        await stage.ask()
        drafter.gate.clear()
        await stage.settle()
        assert (drafter.frames[-1].commits, len(drafter.frames[-1].released)) == ((), 1)
        (replica,) = stage.coordinator._pool
        assert replica.unanswered_since is None


async def test_a_tree_for_a_text_that_is_over_is_no_success():
    drafter = ToyDrafter("a", oracle_chain())
    async with at_work(drafter, breaker_failures=2) as stage:
        await stage.ask()
        (replica,) = stage.coordinator._pool
        replica.breaker.record_failure("stalled", 0.0)
        late = drafter.answer(replace(drafter.frames[0], released=()))
        assert late.proposals
        stage.coordinator._pool.receive(replica, late)
        assert replica.breaker.record_failure("stalled", 0.0), "two failures in a row"


async def test_a_full_drafter_refuses_what_is_new_and_keeps_what_it_has():
    target = ToyTarget()
    drafter = RefusingDrafter("a", oracle_in_a_crowd(3), code=CapacityError.code)
    async with at_work(target, drafter, breaker_failures=1) as stage:
        first = stage.begin(id="kept", params=LONGER)
        await target.wait_for_steps(4)
        await stage.ask(id="new", params=replace(GREEDY, max_tokens=10))
        assert stage.status()["drafters"][0]["breaker"] == "closed"
        assert not first.done()
        assert "kept" not in drafter.released
        assert (await first)[-1].finish_reason == "length"


async def test_a_request_that_a_drafter_fails_on_is_not_sent_to_it_again_and_again():
    drafter = RefusingDrafter("a", oracle_in_a_crowd(3), code=WorkerError.code)
    async with at_work(drafter, breaker_failures=3, breaker_reset_s=60.0) as stage:
        await asyncio.gather(*(stage.ask(id=name, params=LONGER) for name in ("kept", "bad")))
        sent = [c.base_len for c in drafter.commits if c.request_id == "bad"]
        assert sent[0] == 0
        assert len(sent) <= 3
        assert 'drafter_faults_total{drafter="a",why="refused"} 1.0' in stage.metrics()


async def test_a_lost_workers_gauges_go_with_it():
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
        assert 'worker="gone-' not in after
        assert "drafthouse_target_up 0.0" in after
        assert 'drafthouse_drafter_up{drafter="a"} 0.0' in after


async def test_a_drafter_that_does_not_fit_is_refused_loudly():
    async with at_work() as stage:
        with pytest.raises(ProtocolError) as caught:
            stage.add_drafter(ToyDrafter("a", oracle_chain()), tokenizer_hash="other")
        assert stage.status()["refused"] == {"a": caught.value.message}
        options = SpeculationOptions(drafters=("a",))
        events = await stage.ask(speculation=options)
        assert events[-1].stats.idle_because == "no_drafter_for_model"
        stage.add_drafter(ToyDrafter("a", oracle_chain()))
        assert stage.status()["refused"] == {}
        events = await stage.ask(speculation=options)
        assert events[-1].stats.idle_because == ""


async def test_the_first_target_decides_which_drafters_fit():
    async with house() as stage:
        stage.add_drafter(ToyDrafter("a", oracle_chain()), tokenizer_hash="other")
        stage.add_target(ToyTarget())
        assert stage.status()["drafters"] == []
        assert "tokenizer other" in stage.status()["refused"]["a"]


async def test_a_request_that_brings_down_every_target_ends_with_an_error():
    async with house(drafters=()) as stage:
        running = stage.begin(error=WorkerError.code)
        for life in range(8):
            if running.done():
                break
            toy = ToyTarget(is_held=True)
            link = stage.add_target(toy, f"t{life}")
            await toy.wait_for_frames(1)
            link.sever()
            await stage.settle(20)
        await running


async def test_of_replicas_that_came_and_went_no_more_than_some_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("cluster.coordinator.drafters._MAX_BREAKERS", 2)
    async with house() as stage:
        for life in range(4):
            stage.add_drafter(ToyDrafter("a", oracle_chain()), f"life-{life}").sever()
            await stage.settle(20)
        known = [replica_id for _, replica_id, _ in stage.coordinator._pool.breakers]
    assert known == ["life-2", "life-3"]


async def test_every_tree_is_looked_at_before_anything_uses_it():
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
        assert stage.status()["faults"] == {"a": {"rubbish": num_frames}}


async def test_a_drafter_with_another_model_is_scored_anew_and_finds_its_score_again():
    async with at_work() as stage:

        async def trees_with(model_hash: str) -> float:
            """Those scored of the replica with this model, after one more text."""
            stage.add_drafter(ToyDrafter("a", oracle_chain(), model_hash=model_hash))
            await stage.ask(params=LONGER)
            await stage.settle()
            (row,) = stage.status()["scores"]
            assert row["version"] == f"a@{model_hash}"
            return float(row["trees"])

        first = await trees_with("one")
        other = await trees_with("two")
        assert 0 < other < 2 * first
        assert await trees_with("one") > first


async def ask(stage: House, count: int) -> None:
    for index in range(count):
        await stage.ask(id=f"r{index}-{stage.clock.now}")
        await stage.settle()


async def test_another_model_in_a_drafters_place_does_not_inherit_its_open_breaker():
    failing = RefusingDrafter("b", oracle_chain(), code=WorkerError.code, model_hash="old")
    async with at_work(failing, breaker_failures=3) as stage:
        await ask(stage, 2)
        status = stage.status()
        assert (status["faults"], status["left_alone"]) == ({"b": {"refused": 2}}, [])
        await ask(stage, 1)
        stage.add_drafter(ToyDrafter("b", oracle_chain(), model_hash="old"))
        assert stage.status()["left_alone"] == ["b"], "the same one, started anew"
        stage.add_drafter(ToyDrafter("b", oracle_chain(), model_hash="new"))
        assert stage.status()["left_alone"] == []


async def test_the_same_fault_is_said_once_a_minute(caplog: pytest.LogCaptureFixture):
    async with at_work(
        RefusingDrafter("b", oracle_chain(), code=WorkerError.code), breaker_failures=1000
    ) as stage:
        await ask(stage, 10)
        stage.clock.now += 61.0
        await ask(stage, 1)
    _, again = (line for line in caplog.messages if "name=b" in line)
    assert "times=11" in again


async def test_a_full_drafter_gets_no_more_texts_and_is_told_what_its_trees_are_worth():
    target = ToyTarget(is_held=True)
    async with at_work(target) as stage:
        drafter = ToyDrafter("a", oracle_chain())
        stage.add_drafter(drafter, max_running_sequences=2)
        tasks = [stage.begin(id=f"q{i}") for i in range(5)]
        await stage.settle(20)
        assert len(drafter.contexts) == 2
        assert stage.coordinator.demand() == {"a": {"waiting": 3, "worth": 0.0}}
        target.gate.set()
        await asyncio.gather(*tasks)
        stage.clock.now += 2.0
        said = stage.coordinator.demand()["a"]
        assert said["waiting"] == 0
        assert said["worth"] > 10.0, "of 200 tokens in two seconds it has guessed some"
        await stage.ask(id="more")
        assert stage.coordinator.demand()["a"]["worth"] == 0.0, "in no time"
