"""A malformed item is refused by name and does not affect the others of its frame."""

from typing import Any

import pytest

from cluster.client.generated import common_pb2
from cluster.core import FinishReason, TokenEvent, token_array
from cluster.errors import ProtocolError
from cluster.messages import Refusal, TextName, VerdictFrame
from cluster.rpc.codec import FINISH, LOGPROBS
from cluster.rpc.conversations import COMMIT, COORDINATOR, EVENT, STEPS, SUBMIT, VERDICT
from cluster.rpc.generated import coordinator_pb2, draft_pb2, target_pb2
from tests.support.rpc.frames_strategy import same

PARAMS = common_pb2.SamplingParams()


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
        coordinator_pb2.Request(id="b", prompt_ids=bytes(3), params=PARAMS),
    ]
    message = coordinator_pb2.SubmitFrame(requests=requests, cancelled=["d"])
    frame, refusals = SUBMIT.decode(message.SerializeToString())
    assert (frame.requests, frame.cancelled) == ((), ("d",))
    assert [(each.request_id, each.generation, each.message) for each in refusals] == [
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
    (refusal,) = refusals
    assert (refusal.request_id, refusal.generation, refusal.code) == ("a", 2, ProtocolError.code)
    assert "2 logit_bias_token_ids and 1 logit_bias_values" in refusal.message


def test_logprobs_that_do_not_add_up_are_refused():
    for broken in (
        common_pb2.Logprobs(logprobs=[-1.0, -2.0], num_top=[0]),
        common_pb2.Logprobs(logprobs=[-1.0], num_top=[2]),
        common_pb2.Logprobs(
            logprobs=[-1.0], num_top=[1], top_token_ids=[5], top_logprobs=[-1.0, -2.0]
        ),
    ):
        with pytest.raises(ProtocolError):
            LOGPROBS.decode(broken)


def test_an_unknown_finish_reason_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="99"):
        FINISH.decode(99)


def test_bytes_that_are_not_a_frame_are_a_protocol_error():
    with pytest.raises(ProtocolError, match="not a StepFrame"):
        STEPS.decode(b"\xff\xff\xff")


def opened(name: str, **fields: Any) -> target_pb2.Open:
    return target_pb2.Open(request_id=name, **{"token_ids": bytes(4), "params": PARAMS, **fields})


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
    assert [(each.request_id, each.generation, each.message) for each in refusals] == [
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
    good: dict[str, Any] = {
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


@pytest.mark.parametrize("field", ["token_ids", "sources"])
def test_a_torn_verdict_becomes_a_refusal_of_its_text_that_names_the_array(field: str):
    torn = target_pb2.TextVerdict(request_id="a", generation=3, token_ids=bytes(4))
    good = target_pb2.TextVerdict(request_id="b", token_ids=bytes(4))
    setattr(torn, field, bytes(5))
    message = target_pb2.VerdictFrame(verdicts=[torn, good])
    frame, _ = VERDICT.decode(message.SerializeToString())
    assert [each.request_id for each in frame.verdicts] == ["b"]
    (refusal,) = frame.refusals
    assert (refusal.request_id, refusal.generation) == ("a", 3)
    assert refusal.message.startswith(f"{field} has 5 bytes; ")


def test_a_reason_that_nobody_knows_becomes_a_refusal_of_the_text():
    message = target_pb2.VerdictFrame(verdicts=[target_pb2.TextVerdict(request_id="a")])
    message.verdicts[0].why = 99  # type: ignore[assignment]
    frame, _ = VERDICT.decode(message.SerializeToString())
    assert frame.verdicts == ()
    assert frame.refusals == (
        Refusal("a", 0, ProtocolError.code, "why is 99, which this version does not know"),
    )
