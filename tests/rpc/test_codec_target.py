"""Frames between coordinators and targets: what is wrong in one text does not touch the others."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.client.generated import common_pb2
from cluster.errors import ProtocolError
from cluster.messages import Refusal, TextName, VerdictFrame
from cluster.rpc.conversations import STEPS, VERDICT
from cluster.rpc.generated import target_pb2

PARAMS = common_pb2.SamplingParams()


def opened(name: str, **fields: Any) -> target_pb2.Open:
    return target_pb2.Open(request_id=name, **{"token_ids": bytes(4), "params": PARAMS, **fields})


def test_a_malformed_text_is_refused_and_the_rest_of_the_frame_is_decoded() -> None:
    message = target_pb2.StepFrame(
        opens=[
            opened("torn", generation=7, token_ids=bytes(3)),
            opened("good"),
            opened("empty", token_ids=b""),
            target_pb2.Open(request_id="bare", token_ids=bytes(4)),
        ],
        cancels=[target_pb2.TextName(request_id="gone", generation=2)],
        serial=5,
    )
    decoded = STEPS.decode(message.SerializeToString())
    assert [each.request_id for each in decoded.frame.opens] == ["good"]
    assert decoded.frame.cancels == (TextName("gone", 2),)
    assert decoded.frame.serial == 5
    assert [(each.request_id, each.generation, each.message) for each in decoded.refusals] == [
        ("torn", 7, "token_ids has 3 bytes; int32[] takes a multiple of 4"),
        ("empty", 0, "token_ids is empty; send the whole text"),
        ("bare", 0, "params is absent"),
    ]
    assert {refusal.code for refusal in decoded.refusals} == {ProtocolError.code}


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
def test_a_step_that_is_none_refuses_its_text(bad: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        "token_ids": [3],
        "parents": [-1],
        "survival": [0.5],
        "sources": [1],
        "path": [0],
    }

    def decoded(step: dict[str, Any]) -> VerdictFrame:
        verdict = target_pb2.TextVerdict(request_id="a", step=common_pb2.DraftStep(**step))
        return VERDICT.decode(target_pb2.VerdictFrame(verdicts=[verdict]).SerializeToString()).frame

    assert decoded(good).verdicts[0].step is not None
    (refusal,) = decoded(good | bad).refusals
    assert said in refusal.message


@pytest.mark.parametrize("field", ["token_ids", "sources"])
def test_a_torn_verdict_becomes_a_refusal_of_its_text_that_names_the_array(field: str) -> None:
    torn = target_pb2.TextVerdict(request_id="a", generation=3, token_ids=bytes(4))
    good = target_pb2.TextVerdict(request_id="b", token_ids=bytes(4))
    setattr(torn, field, bytes(5))
    message = target_pb2.VerdictFrame(verdicts=[torn, good])
    frame = VERDICT.decode(message.SerializeToString()).frame
    assert [each.request_id for each in frame.verdicts] == ["b"]
    (refusal,) = frame.refusals
    assert (refusal.request_id, refusal.generation) == ("a", 3)
    assert refusal.message.startswith(f"{field} has 5 bytes; ")


def test_a_reason_that_nobody_knows_becomes_a_refusal_of_the_text() -> None:
    message = target_pb2.VerdictFrame(verdicts=[target_pb2.TextVerdict(request_id="a")])
    message.verdicts[0].why = 99  # type: ignore[assignment]
    frame = VERDICT.decode(message.SerializeToString()).frame
    assert frame.verdicts == ()
    assert frame.refusals == (
        Refusal("a", 0, ProtocolError.code, "why is 99, which this version does not know"),
    )
