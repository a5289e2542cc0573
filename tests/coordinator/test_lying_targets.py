"""What cannot be true of a target's word costs a retry; what it says of itself costs nothing."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.coordinator.target_links import problem_of
from cluster.core import TokenLogprob, token_array
from cluster.errors import ProtocolError
from cluster.requests.fields import PlainWhy
from cluster.rpc.messages import (
    Heartbeat,
    Load,
    Refusal,
    StepReport,
    TextName,
    TextVerdict,
    VerdictFrame,
)
from tests.support.coordinator.house import GREEDY, SEEDED, at_work, house, session
from tests.support.coordinator.toys import (
    VOCAB_SIZE,
    ToyDrafter,
    ToyTarget,
    oracle_in_a_crowd,
    told_instead,
)

Lie = Callable[[TextVerdict], TextVerdict]
NAN = float("nan")


def saying(**fields: Any) -> Lie:
    return lambda verdict: replace(verdict, **fields)


def tokens(*token_ids: int) -> Lie:
    return saying(token_ids=token_array(token_ids))


# What is seen to be wrong, so that the text begins anew from what is known.
WRONG: dict[str, Lie] = {
    "outside the vocabulary": tokens(VOCAB_SIZE),
    "negative": tokens(-1),
    "too many tokens": tokens(*[1] * 60),
    "nothing": saying(token_ids=token_array([]), finish_reason=None),
    "more accepted than verified": saying(num_nodes=1, sources=np.ones(3, np.uint32)),
    "credit for nobody": saying(owners=(7,) * 3),
    "beams": saying(beams=("beam",)),
    "a gap": lambda verdict: replace(verdict, context_len=verdict.context_len + 1),
    "far ahead": saying(context_len=2**32 - 1),
}
# What is of no text that is known: the target must be asked again once that is seen.
STALE: dict[str, Lie] = {
    "another request": saying(request_id="another"),
    "an older generation": saying(generation=0),
    "a later generation": saying(generation=2**63),
    "what is known": lambda verdict: replace(verdict, context_len=verdict.context_len - 1),
    "the beginning": saying(context_len=0),
}
# What is wrong beside the text.
BESIDE: dict[str, Lie] = {
    "names without end": saying(verified=(2**31,) * 40),
    "bits of nobody": lambda verdict: replace(
        verdict, sources=np.full(len(verdict.sources), 2**32 - 1, np.uint32)
    ),
    "no verified drafts": saying(verified=()),
    "a reason for drafts": saying(why=PlainWhy.GUARD),
    "cached tokens": saying(num_cached=2**31),
}


def told_now_and_then(lie: Lie) -> Callable[..., VerdictFrame]:
    """Every third verdict is a lie, but for the last one of a text."""
    numbers = itertools.count(1)

    def said(verdict: TextVerdict) -> TextVerdict:
        is_lie = next(numbers) % 3 == 2 and verdict.finish_reason is None
        return lie(verdict) if is_lie else verdict

    return told_instead(said)


@pytest.mark.parametrize(("name", "lie"), {**WRONG, **STALE, **BESIDE}.items())
async def test_what_cannot_be_costs_a_retry_and_not_the_text(name: str, lie: Lie):
    toy = ToyTarget(says=told_now_and_then(lie))
    async with at_work(toy, ToyDrafter("a", oracle_in_a_crowd(1))) as stage:
        await stage.finish(stage.begin(params=SEEDED))
        assert stage.target_ids() == ["target-0"]
        metrics = stage.metrics()
        assert "drafthouse_bookkeeping_faults_total{" not in metrics
        num_opened = len(toy.opens)
        assert (num_opened > 1) is (name not in BESIDE)
        await stage.pass_time(2.0)
        assert toy.contexts == {}


async def test_log_probabilities_must_be_as_many_as_the_tokens():
    logprob = TokenLogprob(1, -0.5, ())
    params = replace(GREEDY, logprobs=0)
    lie = told_now_and_then(saying(logprobs=(logprob,) * 9))
    async with at_work(ToyTarget(says=lie), drafters=[]) as stage:
        events = await stage.ask(params=params)
    assert sum(len(event.logprobs) for event in events) == params.max_tokens


async def test_a_target_that_never_says_what_can_be_loses_the_request_to_another():
    lying = ToyTarget(says=told_instead(WRONG["negative"]))
    async with house([]) as stage:
        stage.add_target(lying, "lying")
        running = stage.begin()
        await lying.wait_for_steps(1)
        stage.add_target(ToyTarget(), "other")
        await running
    async with house([]) as stage:
        stage.add_target(lying, "lying")
        await stage.ask(error=ProtocolError.code)


FRAMES = {
    "texts that are not here": VerdictFrame(
        heartbeat=Heartbeat((TextName("x", 1), TextName("r", 2**63)), heard=0)
    ),
    "heard what was not sent": VerdictFrame(heartbeat=Heartbeat((), heard=2**63)),
    "no places": VerdictFrame(load=Load(1, 2**32 - 1, 2**32 - 1, 0, 2**32 - 1, 0)),
    "no steps": VerdictFrame(load=Load(0, 0, 0, 2**64 - 1)),
    "times": VerdictFrame(report=StepReport(NAN, -1.0, float("inf"), -NAN, -5, -5, -5, -5, -5)),
    "a status": VerdictFrame(status="{"),
    "another status": VerdictFrame(status="[1, 2]"),
    "no page": VerdictFrame(page=b"\xff"),
    "a page that cannot be read": VerdictFrame(page=b"drafthouse_target_speedup{"),
    "another's metrics": VerdictFrame(page=b"# TYPE drafthouse_requests counter\n"),
    "refusals": VerdictFrame(refusals=(Refusal("x", 1, "no code", ""), Refusal("r", 0, "", ""))),
    "a serial": VerdictFrame(serial=2**63),
}


async def test_what_a_target_says_of_itself_changes_no_text():
    num_frames, lies = 0, itertools.cycle(FRAMES.values())
    toy = ToyTarget()

    def said(frame: VerdictFrame) -> VerdictFrame:
        nonlocal num_frames
        num_frames += 1
        if num_frames % 4:
            return frame
        lie = next(lies)
        for stream in toy.streams:
            stream.post(lie)
        return replace(frame, serial=lie.serial or frame.serial)

    toy.says = said
    async with at_work(toy, ToyDrafter("a", oracle_in_a_crowd(1)), may_fault=True) as stage:
        for name in ("r", "s"):
            await stage.ask(params=replace(SEEDED, max_tokens=150), id=name)
        assert num_frames > 4 * len(FRAMES)
        assert stage.target_ids() == ["target-0"]
        assert "drafthouse_failovers_total 0.0" in stage.metrics()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("outside the vocabulary", "outside the vocabulary"),
        ("too many tokens", "60 tokens, 40 are left"),
        ("nothing", "brings nothing"),
        ("more accepted than verified", "accepts 3 drafts of 1"),
        ("beams", "has beams, the request none"),
    ],
)
def test_it_is_said_why_a_verdict_cannot_be(name: str, problem: str):
    honest = TextVerdict("r", 0, 3, token_array([1]), np.empty(0, np.uint32))
    assert problem_of(honest, session(), VOCAB_SIZE) is None
    assert problem in (problem_of(WRONG[name](honest), session(), VOCAB_SIZE) or "")
