"""Frames survive encoding and decoding, those over the limit in several parts.  A malformed item is
refused by name and does not affect the others of its frame."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.client.generated import common_pb2
from cluster.core import (
    FinishReason,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    TokenTree,
    token_array,
)
from cluster.errors import ProtocolError
from cluster.plan.texts import NO_SOURCES
from cluster.requests.fields import BeamEnd
from cluster.rpc.codec import LOGPROBS, PARAMS
from cluster.rpc.conversations import COMMIT, COORDINATOR, EVENT, STEPS, SUBMIT, VERDICT
from cluster.rpc.frames import FrameCodec, split
from cluster.rpc.generated import coordinator_pb2, draft_pb2, target_pb2
from cluster.rpc.messages import (
    EventFrame,
    Heartbeat,
    PoolTree,
    ProposalFrame,
    Refusal,
    StepFrame,
    StepReport,
    TextName,
    TextVerdict,
    VerdictFrame,
)
from tests.support.choices import by_day
from tests.support.rpc.frames_strategy import FRAMES, same, text

FIELD_OF_A_NEWER_RELEASE = b"\xc2\x3e\x03new"  # number 1000, three bytes


# Frames are large, and each has many items of its kinds.
@pytest.mark.parametrize(("frame_codec", "strategy"), FRAMES.values(), ids=FRAMES)
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


def test_token_ids_travel_as_little_endian_int32():
    tree = PoolTree(
        "a", 1, 2, 3, TokenTree.of([258], [-1]), np.ones(1, np.float32), np.array([5], np.uint32)
    )
    message = target_pb2.StepFrame.FromString(STEPS.encode(StepFrame(trees=(tree,)))[0])
    assert message.trees[0].token_ids == b"\x02\x01\x00\x00"
    assert message.trees[0].parents == b"\xff\xff\xff\xff"
    assert message.trees[0].sources == b"\x05\x00\x00\x00"


def sent(codec: FrameCodec[Any], frame: Any) -> tuple[Any, list[Refusal]]:
    """What comes of a frame at the other end, and what is refused of it."""
    return codec.decode(codec.encode(frame)[0])


def test_decoded_arrays_are_views_of_the_message_and_read_only():
    frame, _ = sent(STEPS, StepFrame((text("a"),)))
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
        assert same(sent(codec, frame), (frame, []))


def test_texts_of_more_tokens_than_came_end_the_request_with_an_error():
    event = TokenEvent("a", 0, token_array([5, 6, 7]), beams=(*ENDS, ENDS[2]))
    frame, _ = sent(EVENT, EventFrame((event,)))
    assert frame.events[0].error_message == "event has 3 tokens, its beams 4"


# Frames over the limit are sent as several, and those say the same.


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
    first, second = split(frame)
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


# What is malformed.


DEFAULTS = common_pb2.SamplingParams()


def reasons(refusals: Sequence[Refusal]) -> list[tuple[str, int, str]]:
    return [(each.request_id, each.generation, each.message) for each in refusals]


def test_a_coordinator_answers_a_malformed_request_by_the_event_that_ends_it():
    refusals = (Refusal("a", 1, "protocol_error", "why"),)
    (event,) = COORDINATOR.refuse(refusals).events
    expected = TokenEvent(
        "a", 0, token_array([]), (), FinishReason.ERROR, None, "protocol_error", "why"
    )
    assert same(event, expected)


def test_an_undecodable_event_ends_its_request_with_an_error():
    bad = coordinator_pb2.TokenEvent(request_id="a", position=5, token_ids=b"\x00")
    frame, _ = EVENT.decode(coordinator_pb2.EventFrame(events=[bad]).SerializeToString())
    (event,) = frame.events
    assert event.finish_reason is FinishReason.ERROR
    assert (event.request_id, event.position, event.error_code) == ("a", 5, ProtocolError.code)
    assert event.error_message == "token_ids has 1 bytes; int32[] takes a multiple of 4"


def test_a_request_without_parameters_or_with_torn_tokens_is_refused():
    requests = [
        coordinator_pb2.Request(id="a", prompt_ids=bytes(4)),
        coordinator_pb2.Request(id="b", prompt_ids=bytes(3), params=DEFAULTS),
    ]
    message = coordinator_pb2.SubmitFrame(requests=requests, cancelled=["d"])
    frame, refusals = SUBMIT.decode(message.SerializeToString())
    assert (frame.requests, frame.cancelled) == ((), ("d",))
    assert reasons(refusals) == [
        ("a", 0, "params is absent"),
        ("b", 0, "prompt_ids has 3 bytes; int32[] takes a multiple of 4"),
    ]


def test_a_bias_without_a_value_for_each_token_is_refused():
    params = common_pb2.SamplingParams(logit_bias_token_ids=[1, 2], logit_bias_values=[0.5])
    commit = draft_pb2.Commit(request_id="a", generation=2, params=params)
    good = draft_pb2.Commit(request_id="b")
    message = draft_pb2.CommitFrame(commits=[commit, good], released=["c"])
    frame, refusals = COMMIT.decode(message.SerializeToString())
    assert [each.request_id for each in frame.commits] == ["b"]
    assert frame.released == ("c",)
    assert refusals == [
        Refusal(
            "a",
            2,
            ProtocolError.code,
            "params has 2 logit_bias_token_ids and 1 logit_bias_values; one value per id",
        )
    ]


def test_logprobs_that_do_not_add_up_are_refused():
    for broken in (
        common_pb2.Logprobs(logprobs=[-1.0, -2.0], num_top=[0]),
        common_pb2.Logprobs(logprobs=[-1.0], num_top=[2]),
        common_pb2.Logprobs(
            logprobs=[-1.0], num_top=[1], top_token_ids=[5], top_logprobs=[-1.0, -2.0]
        ),
        common_pb2.Logprobs(logprobs=[-1.0], num_top=[0], ranks=[1, 2]),
    ):
        with pytest.raises(ProtocolError, match="logprobs"):
            LOGPROBS.decode(broken)


def test_bytes_that_are_not_a_frame_are_a_protocol_error():
    with pytest.raises(ProtocolError, match="not a StepFrame"):
        STEPS.decode(b"\xff\xff\xff")


def opened(name: str, **fields: Any) -> target_pb2.Open:
    return target_pb2.Open(request_id=name, **{"token_ids": bytes(4), "params": DEFAULTS, **fields})


def test_a_malformed_text_is_refused_and_the_rest_of_the_frame_is_decoded():
    message = target_pb2.StepFrame(
        opens=[
            opened("torn", generation=7, token_ids=bytes(3)),
            opened("good"),
            target_pb2.Open(request_id="bare", token_ids=bytes(4)),
        ],
        cancels=[target_pb2.TextName(request_id="gone", generation=2)],
        serial=5,
    )
    frame, refusals = STEPS.decode(message.SerializeToString())
    assert [each.request_id for each in frame.opens] == ["good"]
    assert frame.cancels == (TextName("gone", 2),)
    assert frame.serial == 5
    assert reasons(refusals) == [
        ("torn", 7, "token_ids has 3 bytes; int32[] takes a multiple of 4"),
        ("bare", 0, "params is absent"),
    ]
    assert {refusal.code for refusal in refusals} == {ProtocolError.code}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"parents": [1]}, "parent"),
        ({"token_ids": [3, 4], "survival": [0.5, 0.5], "sources": [1, 1]}, "parents"),
        ({"survival": [float("nan")]}, "other survivals"),
        ({"sources": []}, "other survivals"),
        ({"path": [1]}, "path"),
    ],
)
def test_a_step_that_is_none_refuses_its_text(bad: dict[str, Any], said: str):
    good = {
        "token_ids": [3],
        "parents": [-1],
        "survival": [0.5],
        "sources": [1],
        "path": [0],
    }

    def decoded(step: dict[str, Any]) -> VerdictFrame:
        verdict = target_pb2.TextVerdict(request_id="a", step=common_pb2.DraftStep(**step))
        return VERDICT.decode(target_pb2.VerdictFrame(verdicts=[verdict]).SerializeToString())[0]

    assert decoded(good).verdicts[0].step is not None
    (refusal,) = decoded(good | bad).refusals
    assert said in refusal.message


def test_a_malformed_verdict_becomes_a_refusal_of_its_text():
    verdicts = [
        target_pb2.TextVerdict(request_id=name, token_ids=bytes(4))
        for name in ("torn", "good", "odd")
    ]
    message = target_pb2.VerdictFrame(verdicts=verdicts)
    message.verdicts[0].generation, message.verdicts[0].sources = 3, bytes(5)
    message.verdicts[2].why = 99
    frame, _ = VERDICT.decode(message.SerializeToString())
    assert [each.request_id for each in frame.verdicts] == ["good"]
    assert reasons(frame.refusals) == [
        ("torn", 3, "sources has 5 bytes; uint32[] takes a multiple of 4"),
        ("odd", 0, "why is 99, which this version does not know"),
    ]
