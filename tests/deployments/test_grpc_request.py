"""gRPC requests to validated specifications."""

from __future__ import annotations

import pytest

from cluster.core import token_array
from cluster.errors import RequestError
from cluster.rpc.generation import GenerationRequest, ResumedChoice
from deployments.ingress.grpc_request import request_name, to_spec
from tests.deployments.test_openai_request import LIMITS, refused


def test_a_request_keeps_its_id_or_gets_one() -> None:
    assert request_name(GenerationRequest("demo", "x", request_id="mine")) == "mine"
    drawn = {request_name(GenerationRequest("demo", "x")) for _ in range(2)}
    assert len(drawn) == 2


@pytest.mark.parametrize("name", ["x" * 129, "two\nlines"])
def test_an_invalid_request_id_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="at most 128 printable") as caught:
        request_name(GenerationRequest("demo", "x", request_id=name))
    assert caught.value.param == "request_id"


@pytest.mark.parametrize(
    ("choices", "param"),
    [
        ([(0, [5]), (0, [6])], "resume"),
        ([(2, [5])], "resume"),
        ([(1, [5]), (0, [5, LIMITS.vocab_size])], "resume[1].token_ids"),
        ([(0, [-1])], "resume[0].token_ids"),
    ],
)
def test_an_impossible_resumption_is_refused(
    choices: list[tuple[int, list[int]]], param: str
) -> None:
    resume = tuple(ResumedChoice(index, token_array(ids)) for index, ids in choices)
    request = GenerationRequest("demo", "x", n=2, resume=resume)
    assert refused(to_spec, request, LIMITS).param == param


def test_a_resumption_may_have_no_tokens_yet() -> None:
    resume = (ResumedChoice(1, token_array([])), ResumedChoice(0, token_array([3])))
    to_spec(GenerationRequest("demo", "x", n=2, resume=resume), LIMITS)
