"""What waits for a slow client takes little room and says the same."""

import asyncio
import sys

import numpy as np
import pytest

from cluster.core import (
    FinishReason,
    Request,
    SamplingParams,
    SpeculationStats,
    TokenEvent,
    TokenLogprob,
    token_array,
)
from cluster.errors import WorkerError
from cluster.text.prompt import Prompt
from deployments.ingress.choice import PreparedPrompt
from deployments.ingress.ticket import MAX_PIECES, Ticket

NUM_STEPS = 5000


def event(position: int, *, is_last: bool = False) -> TokenEvent:
    return TokenEvent(
        "r",
        position,
        token_array([position, position + 1]),
        (TokenLogprob(-1.0), TokenLogprob(-2.0)),
        FinishReason.STOP if is_last else None,
        SpeculationStats(num_steps=NUM_STEPS) if is_last else None,
        draft_sources=(("lm",), ()),
    )


async def filled(count: int) -> Ticket:
    ticket = Ticket(Request("r", token_array([1]), SamplingParams()), asyncio.Event())
    for step in range(count):
        ticket.push(event(2 * step, is_last=step == count - 1))
    return ticket


@pytest.mark.parametrize("count", [1, 2, MAX_PIECES, MAX_PIECES + 1, NUM_STEPS])
async def test_nothing_is_lost_or_moved(count: int):
    ticket = await filled(count)
    # Another coordinator is given all of it.
    resumed = ticket.resumed()
    assert (len(resumed.output_ids), resumed.was_admitted) == (2 * count, True)
    events = ticket.take()
    assert len(events) <= MAX_PIECES
    tokens = np.concatenate([one.token_ids for one in events])
    expected = [token for step in range(count) for token in (2 * step, 2 * step + 1)]
    assert tokens.tolist() == expected
    position = 0
    for one in events:
        assert one.position == position
        assert len(one.logprobs) == len(one.draft_sources) == len(one.token_ids)
        position += len(one.token_ids)
    assert [one.finish_reason for one in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].stats is not None


async def test_an_error_is_told_though_it_came_with_events():
    ticket, score = await filled(0), PreparedPrompt(Prompt(), 0, ticket=await filled(0))
    assert not ticket.resumed().was_admitted
    for each in (ticket, score.ticket):
        each.push(event(0))
        each.fail(WorkerError("lost"))
        each._signal.clear()
    assert len(ticket.take()) == 1
    assert ticket._signal.is_set()
    for take in (ticket.take, score.take):
        with pytest.raises(WorkerError):
            take()


async def test_a_token_that_waits_takes_a_few_bytes():
    ticket = await filled(0)
    for step in range(NUM_STEPS):
        ticket.push(TokenEvent("r", step, token_array([step])))
    held = ticket.take()
    size = sum(sys.getsizeof(one) + one.token_ids.nbytes for one in held)
    assert size < 6 * NUM_STEPS + 300 * MAX_PIECES
