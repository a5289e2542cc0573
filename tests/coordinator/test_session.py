"""Where a text ends."""

import asyncio

import pytest

from cluster.coordinator.session import Session
from cluster.coordinator.target_links import problem_of
from cluster.core import FinishReason, SamplingParams, TokenEvent, token_array
from cluster.errors import CapacityError
from cluster.messages import Load, Refusal, TextVerdict, VerdictFrame
from cluster.plan.texts import NO_SOURCES
from cluster.requests.fields import Redraw
from tests.support.coordinator.house import at_work, request
from tests.support.coordinator.toys import ToyTarget


def session(max_tokens: int = 9) -> Session:
    asked = request([5, 6], SamplingParams(max_tokens=max_tokens), output_ids=token_array([7]))
    return Session("r", asked, lambda event: None, 0.0)


@pytest.mark.parametrize(
    ("max_tokens", "max_context_len", "remaining"),
    [(9, 0, 8), (9, 11, 8), (9, 12, 8), (9, 10, 7), (9, 3, 0), (9, 2, -1), (1, 100, 0)],
)
def test_a_text_ends_by_max_tokens_or_by_the_context_limit(
    max_tokens: int, max_context_len: int, remaining: int
):
    text = session(max_tokens)
    text.limit(max_context_len)
    assert text.remaining == remaining


def test_where_a_text_ends_is_fixed_once_it_has_a_place():
    text = session()
    for generation, max_context_len in ((0, 0), (0, 8), (1, 5), (2, 100)):
        text.generation = generation
        text.limit(max_context_len)
    assert text.opened().max_len == 8


def test_the_end_of_a_text_alone_has_its_statistics():
    text = session()
    assert text.event(None, None).stats is None
    assert text.event(None, FinishReason.STOP).stats is not None


@pytest.mark.parametrize(
    ("redraw", "is_sound"),
    [
        (Redraw(1, 4, 0.5), True),
        (Redraw(1, 4, 0.0), True),
        (Redraw(1, 4, -0.1), False),
        (Redraw(2, 4, 0.5), False),
        (Redraw(1, 8, 0.5), False),
    ],
)
def test_an_audit_draws_anew_where_its_verdict_has_tokens(redraw: Redraw, *, is_sound: bool):
    text = session()
    verdict = TextVerdict("r", 0, 3, token_array([3]), NO_SOURCES, redraws=(redraw,))
    assert problem_of(verdict, text, 8) is not None  # no audit
    text.is_audit = True
    assert (problem_of(verdict, text, 8) is None) is is_sound


async def test_a_target_that_says_that_it_is_full_has_no_room_until_it_says_more():
    async with at_work() as stage:
        asking = asyncio.create_task(stage.ask())
        (seat,) = stage.coordinator._present.seats.values()
        await stage.settle(1)  # it has a place; its target has not taken it
        (text,) = seat.sessions.values()
        full = Refusal(text.id, text.generation, CapacityError.code, "full")
        stage.coordinator._targets._take_refusal(seat, text, full)
        assert not seat.has_room()
        seat.note_load(Load(seats=4))
        assert seat.has_room()
        stage.coordinator.tick()
        assert (await asking)[-1].finish_reason is not FinishReason.ERROR


async def test_a_lost_target_holds_no_text_and_nothing_that_it_said_before_counts():
    async with at_work(ToyTarget(is_held=True)) as stage:
        events: list[TokenEvent] = []
        stage.coordinator._table.open("r", request(), events.append)
        (seat,) = stage.coordinator._present.seats.values()
        (text,) = seat.sessions.values()
        late = TextVerdict(text.id, text.generation, 3, token_array([3]), NO_SOURCES)
        stage.coordinator.remove_target(seat.id)
        assert not seat.sessions
        stage.coordinator._targets._take(seat, VerdictFrame(verdicts=(late,)))
        assert len(text.tokens) == 3
        assert not events
