"""A beam search at the coordinator: one item, one event; a target that is lost costs only time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cluster.beam_spec import BeamEnd, BeamSpec
from cluster.beam_texts import beam_event
from cluster.core import FinishReason, Verdict, VerifyItem, token_array
from cluster.errors import RequestError
from cluster.messages import VerdictFrame, VerifyFrame
from tests.support.coordinator.house import GREEDY, collect, house, request
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain

SEARCH = replace(GREEDY, beams=BeamSpec(3))
ENDS = (BeamEnd(2, True, -1.5, -0.5), BeamEnd(0, True, -2.0, -2.0), BeamEnd(3, False, -9.0, -3.0))
TOKENS = (4, 5, 7, 8, 9)


def verdict_of(item: VerifyItem, **changes: Any) -> Verdict:
    found = Verdict(
        item.request_id, item.generation, item.context_len, token_array([]), token_array(TOKENS),
        beams=ENDS,
    )  # fmt: skip
    return replace(found, **changes)


@dataclass
class BeamTarget(ToyTarget):
    """Answers every item with the same three texts.  changes: what it says wrong in them."""

    changes: Any = None

    def answer(self, frame: VerifyFrame) -> VerdictFrame:
        return VerdictFrame(tuple(verdict_of(item, **(self.changes or {})) for item in frame.items))


async def test_all_texts_come_in_one_event_and_drafters_are_not_asked() -> None:
    target, drafter = BeamTarget(), ToyDrafter("a", oracle_chain(7))
    async with house() as stage:
        stage.add_target(target)
        stage.add_drafter(drafter)
        (event,) = await collect(stage.coordinator, request(params=SEARCH))
        await stage.settle()
        assert stage.coordinator.status()["num_running"] == 0
    (item,) = (item for frame in target.frames for item in frame.items)
    assert item.params is not None
    assert item.params.beams == SEARCH.beams
    assert len(item.tree) == 0
    assert item.residents == ()
    assert item.draft_nodes == 0
    assert any(item.request_id in frame.released for frame in target.frames)
    texts = [beam_event(event, rank) for rank in range(4)]
    assert [each.token_ids.tolist() for each in texts] == [[4, 5], [], [7, 8, 9], []]
    assert [each.finish_reason for each in texts[:3]] == [
        FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH,
    ]  # fmt: skip
    assert [each.stats is not None for each in texts] == [True, False, False, False]


async def test_a_search_whose_target_is_lost_runs_again_elsewhere() -> None:
    first, second = BeamTarget(), BeamTarget()
    first.gate.clear()
    async with house() as stage:
        link = stage.add_target(first, "target-0")
        running = asyncio.create_task(collect(stage.coordinator, request(params=SEARCH)))
        await first.wait_for_frames(1)
        stage.add_target(second, "target-1")
        await link.close()
        (event,) = await running
    assert event.token_ids.tolist() == list(TOKENS)
    (item,) = (item for frame in second.frames for item in frame.items)
    assert item.base_len == 0, "it begins anew"
    assert item.generation > first.frames[0].items[0].generation


async def test_a_search_that_is_cancelled_is_taken_back_from_the_target() -> None:
    target = BeamTarget()
    target.gate.clear()
    async with house() as stage:
        stage.add_target(target)
        running = asyncio.create_task(collect(stage.coordinator, request(params=SEARCH)))
        await target.wait_for_frames(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        target.gate.set()
        await target.wait_for_frames(2)
    assert target.frames[1].released == (target.frames[0].items[0].request_id,)


@pytest.mark.parametrize(
    "changes",
    [
        {"beams": ()},
        {"beams": ENDS[:2]},
        {"beams": (*ENDS, BeamEnd(0, True, -9.0, -9.0))},
        {"beams": (replace(ENDS[0], score=float("nan")), *ENDS[1:])},
        {"token_ids": token_array([4, 5, 7, 8, -9])},
        {"path": token_array([0])},
    ],
)
async def test_a_verdict_that_is_no_answer_to_a_search_is_not_believed(changes: Any) -> None:
    async with house() as stage:
        stage.add_target(BeamTarget(changes=changes))
        (event,) = await collect(stage.coordinator, request(params=SEARCH))
    assert event.finish_reason is FinishReason.ERROR
    assert "does not fit" in event.error_message


async def test_beams_for_a_request_that_draws_are_not_believed() -> None:
    async with house() as stage:
        stage.add_target(BeamTarget())
        (event,) = await collect(stage.coordinator, request(params=GREEDY))
    assert event.finish_reason is FinishReason.ERROR
    assert not len(event.token_ids)


async def test_a_search_that_makes_no_sense_is_refused_before_any_work() -> None:
    target = BeamTarget()
    async with house() as stage:
        stage.add_target(target)
        for params in (
            replace(SEARCH, beams=BeamSpec(0)),
            replace(SEARCH, min_tokens=2),
            replace(SEARCH, beams=BeamSpec(2, np.inf)),
        ):
            with pytest.raises(RequestError):
                await collect(stage.coordinator, request(params=params))
    assert not any(frame.items for frame in target.frames)
