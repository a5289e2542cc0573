"""Frames over the limit are sent as several, and those say the same."""

from dataclasses import replace

import pytest

from cluster.core import token_array
from cluster.messages import (
    Heartbeat,
    ProposalFrame,
    Refusal,
    StepFrame,
    StepReport,
    TextName,
    TextVerdict,
    VerdictFrame,
)
from cluster.plan.texts import NO_SOURCES
from cluster.rpc.conversations import STEPS
from cluster.rpc.frames import split
from tests.support.rpc.frames_strategy import same, text


def cancels(*names: str) -> tuple[TextName, ...]:
    return tuple(TextName(name, 1) for name in names)


def test_a_split_frame_keeps_its_scalars_with_the_last_part():
    """What was taken in is said when all of it is there."""
    verdict = TextVerdict("a", 1, 5, token_array([1]), NO_SOURCES)
    frame = VerdictFrame(
        (verdict,),
        (Refusal("b", 1, "worker_error", "lost"),),
        StepReport(step_time_s=1.0),
        serial=7,
        heartbeat=Heartbeat(cancels("a"), 5),
        status="{}",
    )
    halves = split(frame)
    first, second = halves
    assert same(first, VerdictFrame((verdict,)))
    assert same(second, replace(frame, verdicts=()))


@pytest.mark.parametrize("num_texts", [0, 1, 2, 3, 7])
def test_a_split_frame_cancels_texts_before_it_opens_them_again(num_texts: int):
    names = tuple(f"r{index}" for index in range(num_texts))
    texts = tuple(text(name, length=30) for name in names)
    frame = StepFrame(texts, cancels(*names, *"xyz"), serial=4)
    encoded = STEPS.encode(frame, max_bytes=260)
    assert all(len(data) <= 260 for data in encoded)
    parts = [STEPS.decode(data)[0] for data in encoded]
    assert len(parts) >= num_texts
    assert same(tuple(each for part in parts for each in part.opens), texts)
    assert tuple(name for part in parts for name in part.cancels) == frame.cancels
    assert [part.serial for part in parts] == [0] * (len(parts) - 1) + [4]
    if num_texts:
        first = next(index for index, part in enumerate(parts) if part.opens)
        assert not any(part.cancels for part in parts[first + 1 :])


def test_a_frame_without_two_items_cannot_be_split():
    assert split(StepFrame((text("a"),))) is None
    assert split(ProposalFrame(pages_total=3)) is None
