"""The public service's messages and our nouns say the same, both ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from cluster.client.generated import generation_pb2
from cluster.core import SpeculationOptions, SpeculationStats, TokenLogprob, token_array
from cluster.errors import RequestError
from cluster.rpc.codec_generation import DELTA, REQUEST, STATS, decode_request
from cluster.rpc.generation import ChoiceDelta, GenerationRequest
from tests.support.rpc.frames_strategy import same
from tests.support.rpc.generation_strategy import public_requests


@given(request=public_requests)
def test_every_public_request_survives_the_wire(request: GenerationRequest) -> None:
    message = generation_pb2.GenerateRequest.FromString(REQUEST.encode(request).SerializeToString())
    assert same(decode_request(message), request)


def test_a_request_without_a_prompt_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="set text, chat or tokens") as raised:
        decode_request(generation_pb2.GenerateRequest(model="toy"))
    assert raised.value.param == "prompt"


def test_a_field_that_is_gone_is_refused_by_name() -> None:
    former = generation_pb2.SpeculationRequest.FromString(b"\x31" + bytes(8))  # double, number 6
    with pytest.raises(RequestError, match=r"use speculation\.latency_class") as raised:
        decode_request(generation_pb2.GenerateRequest(text="a", speculation=former))
    assert raised.value.param == "speculation.min_tokens_per_s"


def test_what_a_request_leaves_out_has_its_default() -> None:
    bare = decode_request(generation_pb2.GenerateRequest(model="toy", text="a"))
    assert (bare.n, bare.speculation) == (1, SpeculationOptions())


def test_a_prompt_of_tokens_stays_one_though_it_is_empty() -> None:
    message = REQUEST.encode(GenerationRequest("toy", token_array([])))
    prompt = decode_request(message).prompt
    assert isinstance(prompt, np.ndarray)
    assert (len(prompt), prompt.dtype) == (0, np.int32)


def test_a_choice_travels_with_its_tokens_and_says_nothing_of_what_it_lacks() -> None:
    delta = ChoiceDelta(
        2,
        "x",
        token_array([7, 9]),
        (TokenLogprob(-0.5, ((1, -0.5),)), TokenLogprob(-2.0)),
        draft_sources=(("lm", "suffix"), ()),
        cumulative_logprob=-2.5,
    )
    choice = DELTA.encode(delta)
    assert (choice.index, choice.text, [*choice.token_ids]) == (2, "x", [7, 9])
    assert [[*names.names] for names in choice.draft_sources] == [["lm", "suffix"], []]
    assert choice.cumulative_logprob == -2.5
    assert not choice.HasField("stop")
    assert [*choice.logprobs.num_top] == [1, 0]
    assert same(DELTA.decode(choice), delta)


def test_what_speculation_did_is_told_with_its_rates() -> None:
    stats = SpeculationStats(
        9, 2, 8, 3, (1, 0, 0, 1), {"lm": 2, "suffix": 1}, "", {}, {"suffix": 1}, 0.25
    )
    sent = STATS.encode(stats)
    assert (sent.num_steps, sent.num_spec_tokens) == (9, 3)
    assert dict(sent.accepted_by_drafter) == {"lm": 2, "suffix": 1}
    assert sent.mean_acceptance_length == 2.5
    assert sent.draft_acceptance_rate == 0.375
    assert STATS.decode(sent) == stats
