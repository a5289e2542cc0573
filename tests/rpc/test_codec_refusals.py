"""A malformed item is refused by name and does not affect the others of its frame."""

from __future__ import annotations

import pytest

from cluster.client.generated import common_pb2
from cluster.core import (
    FinishReason,
    TokenEvent,
    token_array,
)
from cluster.errors import ProtocolError
from cluster.messages import (
    Refusal,
)
from cluster.rpc.codec import FINISH, LOGPROBS
from cluster.rpc.conversations import COMMIT, COORDINATOR, EVENT, STEPS, SUBMIT
from cluster.rpc.generated import coordinator_pb2, draft_pb2
from tests.support.rpc.frames_strategy import same


def test_a_coordinator_answers_a_malformed_request_by_the_event_that_ends_it() -> None:
    refusals = (Refusal("a", 1, "protocol_error", "why"),)
    (event,) = COORDINATOR.refuse(refusals).events
    expected = TokenEvent(
        "a", 0, token_array([]), (), FinishReason.ERROR, None, "protocol_error", "why"
    )
    assert same(event, expected)


def test_an_undecodable_event_ends_its_request_with_an_error() -> None:
    bad = coordinator_pb2.TokenEvent(request_id="a", position=5, token_ids=b"\x00")
    frame = EVENT.decode(coordinator_pb2.EventFrame(events=[bad]).SerializeToString()).frame
    (event,) = frame.events
    assert event.finish_reason is FinishReason.ERROR
    assert (event.request_id, event.position, event.error_code) == ("a", 5, ProtocolError.code)
    assert event.error_message == "token_ids has 1 bytes; int32[] takes a multiple of 4"


def test_a_request_without_parameters_is_refused() -> None:
    params = common_pb2.SamplingParams()
    speculation = coordinator_pb2.SpeculationOptions()
    requests = [
        coordinator_pb2.Request(id="a", prompt_ids=bytes(4), speculation=speculation),
        coordinator_pb2.Request(id="b", prompt_ids=bytes(4), params=params),
        coordinator_pb2.Request(id="c", params=params, speculation=speculation),
    ]
    message = coordinator_pb2.SubmitFrame(requests=requests, cancelled=["d"])
    decoded = SUBMIT.decode(message.SerializeToString())
    assert (decoded.frame.requests, decoded.frame.cancelled) == ((), ("d",))
    assert [(each.request_id, each.generation, each.message) for each in decoded.refusals] == [
        ("a", 0, "params is absent; send the request's own"),
        ("b", 0, "speculation is absent; send the request's own"),
        ("c", 0, "prompt_ids is empty; send at least one token"),
    ]


def test_a_bias_without_a_value_for_each_token_is_refused() -> None:
    params = common_pb2.SamplingParams(logit_bias_token_ids=[1, 2], logit_bias_values=[0.5])
    commit = draft_pb2.Commit(request_id="a", generation=2, params=params)
    good = draft_pb2.Commit(request_id="b")
    message = draft_pb2.CommitFrame(commits=[commit, good], released=["c"])
    decoded = COMMIT.decode(message.SerializeToString())
    assert [each.request_id for each in decoded.frame.commits] == ["b"]
    assert decoded.frame.released == ("c",)
    (refusal,) = decoded.refusals
    assert (refusal.request_id, refusal.generation, refusal.code) == ("a", 2, ProtocolError.code)
    assert "2 logit_bias_token_ids and 1 logit_bias_values" in refusal.message


def test_logprobs_that_do_not_add_up_are_refused() -> None:
    for broken in (
        common_pb2.Logprobs(logprobs=[-1.0, -2.0], num_top=[0]),
        common_pb2.Logprobs(logprobs=[-1.0], num_top=[2]),
        common_pb2.Logprobs(
            logprobs=[-1.0], num_top=[1], top_token_ids=[5], top_logprobs=[-1.0, -2.0]
        ),
    ):
        with pytest.raises(ProtocolError):
            LOGPROBS.decode(broken)


def test_an_unknown_finish_reason_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="99"):
        FINISH.decode(99)


def test_bytes_that_are_not_a_frame_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="not a StepFrame"):
        STEPS.decode(b"\xff\xff\xff")
