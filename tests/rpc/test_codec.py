"""Frames survive encoding and decoding."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core import SamplingParams, TokenEvent, TokenLogprob, TokenTree, token_array
from cluster.messages import (
    EventFrame,
    PoolTree,
    StepFrame,
    TextVerdict,
    VerdictFrame,
    WorkerDescription,
)
from cluster.plan.texts import NO_SOURCES
from cluster.requests.fields import BeamEnd
from cluster.rpc.codec import DESCRIPTION, PARAMS
from cluster.rpc.conversations import COMMIT, EVENT, PROPOSAL, STEPS, SUBMIT, VERDICT
from cluster.rpc.frames import FrameCodec
from cluster.rpc.generated import target_pb2
from tests.support.choices import by_day
from tests.support.rpc import frames_strategy as frames
from tests.support.rpc.frames_strategy import same, text

FIELD_OF_A_NEWER_RELEASE = b"\xc2\x3e\x03new"  # number 1000, three bytes

ROUND_TRIPS = [
    pytest.param(STEPS, frames.step_frames, id="steps"),
    pytest.param(VERDICT, frames.verdict_frames, id="verdict"),
    pytest.param(COMMIT, frames.commit_frames, id="commit"),
    pytest.param(PROPOSAL, frames.proposal_frames, id="proposal"),
    pytest.param(SUBMIT, frames.submit_frames, id="submit"),
    pytest.param(EVENT, frames.event_frames, id="event"),
]


# Frames are large, and each has many items of its kinds.
@pytest.mark.parametrize(("frame_codec", "strategy"), ROUND_TRIPS)
@by_day(settings(max_examples=20), settings())
@given(data=st.data())
def test_every_frame_survives_the_wire(
    frame_codec: FrameCodec[Any], strategy: st.SearchStrategy[Any], data: st.DataObject
):
    frame = data.draw(strategy)
    (encoded,) = frame_codec.encode(frame)
    decoded, refusals = frame_codec.decode(encoded + FIELD_OF_A_NEWER_RELEASE)
    assert refusals == []
    assert same(decoded, frame)


@given(description=frames.of(WorkerDescription))
def test_a_description_survives_the_wire(description: WorkerDescription):
    assert DESCRIPTION.decode(DESCRIPTION.encode(description)) == description


def test_token_ids_travel_as_little_endian_int32():
    tree = PoolTree(
        "a", 1, 2, 3, TokenTree.of([258], [-1]), np.ones(1, np.float32), np.array([5], np.uint32)
    )
    message = target_pb2.StepFrame.FromString(STEPS.encode(StepFrame(trees=(tree,)))[0])
    assert message.trees[0].token_ids == b"\x02\x01\x00\x00"
    assert message.trees[0].parents == b"\xff\xff\xff\xff"
    assert message.trees[0].sources == b"\x05\x00\x00\x00"


def test_decoded_arrays_are_views_of_the_message_and_read_only():
    frame, _ = STEPS.decode(STEPS.encode(StepFrame((text("a"),)))[0])
    token_ids = frame.opens[0].token_ids
    assert not token_ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        token_ids[0] = 1


def test_a_negative_seed_travels_as_its_64_bits():
    params = SamplingParams(seed=-1)
    assert PARAMS.decode(PARAMS.encode(params)).seed == 2**64 - 1


ENDS = (BeamEnd(2, True, -1.5, -0.75), BeamEnd(0, True, -2.0, -2.0), BeamEnd(1, False, -4.0, -4.0))


def test_the_texts_of_a_search_survive_both_ways_from_target_to_ingress():
    logprobs = tuple(TokenLogprob(-0.5) for _ in range(3))
    verdict = TextVerdict(
        "a", 1, 3, token_array([5, 6, 7]), NO_SOURCES, logprobs=logprobs, beams=ENDS
    )
    event = TokenEvent("a", 0, token_array([5, 6, 7]), beams=ENDS)
    for codec, frame in ((VERDICT, VerdictFrame((verdict,))), (EVENT, EventFrame((event,)))):
        assert same(codec.decode(codec.encode(frame)[0]), (frame, []))


def test_texts_of_more_tokens_than_came_end_the_request_with_an_error():
    event = TokenEvent("a", 0, token_array([5, 6, 7]), beams=(*ENDS, ENDS[2]))
    frame, _ = EVENT.decode(EVENT.encode(EventFrame((event,)))[0])
    assert frame.events[0].error_message == "event has 3 tokens, its beams 4"
