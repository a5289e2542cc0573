"""A beam search at the coordinator: one text, one event; a target that is lost costs only time."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.core import FinishReason, TokenLogprob, token_array
from cluster.engine.work import Verdict
from cluster.errors import DrafthouseError
from cluster.requests.fields import BeamEnd, BeamSpec
from cluster.text.completion import beam_event
from cluster.worker.texts import TargetText
from cluster.worker.verifier import StepAnswers
from tests.support.coordinator.house import GREEDY, at_work
from tests.support.coordinator.toy_target import Asked, Item, ToyVerifier
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain, told_instead

SEARCH = replace(GREEDY, beams=BeamSpec(3))
ENDS = (BeamEnd(2, True, -1.5, -0.5), BeamEnd(0, True, -2.0, -2.0), BeamEnd(3, False, -9.0, -3.0))
TOKENS = (4, 5, 7, 8, 9)


def verdict_of(item: Item) -> Verdict:
    return Verdict(
        item.request_id, item.context_len, token_array([]), token_array(TOKENS), beams=ENDS
    )


class BeamVerifier(ToyVerifier):
    """Answers every item with the same three texts."""

    def __init__(self, toy: ToyTarget) -> None:
        super().__init__(toy)
        self._asked = {}

    @property
    def has_pending(self) -> bool:
        return bool(self._asked)

    def submit(self, asked: Asked) -> dict[str, DrafthouseError]:
        refused = self.noted(asked)
        self._asked.update({item.request_id: item for item in self.sound})
        return refused

    def step(self, ahead: Sequence[TargetText] = ()) -> StepAnswers:
        asked, self._asked = self._asked, {}
        return StepAnswers([verdict_of(item) for item in asked.values()])

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._asked.pop(request_id, None)


class BeamTarget(ToyTarget):
    def make_verifier(self) -> ToyVerifier:
        return BeamVerifier(self)


async def test_all_texts_come_in_one_event_and_drafters_are_not_asked():
    target, drafter = BeamTarget(), ToyDrafter("a", oracle_chain(7))
    async with at_work(target, drafter) as stage:
        (event,) = await stage.ask(params=SEARCH)
        await stage.settle()
        assert stage.status()["num_running"] == 0
        assert list(target.texts) == []
    (opened,) = target.opens
    assert opened.params.beams == SEARCH.beams
    assert (opened.drafters, opened.max_draft_tokens) == ((), 0)
    assert drafter.frames == []
    assert [len(item.tree) for item in target.items] == [0]
    texts = [beam_event(event, rank) for rank in range(4)]
    assert [each.token_ids.tolist() for each in texts] == [[4, 5], [], [7, 8, 9], []]
    assert [each.finish_reason for each in texts[:3]] == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]
    assert [each.stats is not None for each in texts] == [True, False, False, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"beams": ()},
        {"beams": ENDS[:2]},
        {"beams": (*ENDS, BeamEnd(0, True, -9.0, -9.0))},
        {"beams": (replace(ENDS[0], score=float("nan")), *ENDS[1:])},
        {"logprobs": (TokenLogprob(-1.0),)},
        {"token_ids": token_array([4, 5, 7, 8, -9])},
        {"finish_reason": None},
    ],
)
async def test_a_verdict_that_is_no_answer_to_a_search_is_not_believed(changes: Any):
    says = told_instead(lambda verdict: replace(verdict, **changes))
    async with at_work(BeamTarget(says=says)) as stage:
        (event,) = await stage.ask(params=SEARCH)
    assert event.finish_reason is FinishReason.ERROR
    assert "that cannot be" in event.error_message
