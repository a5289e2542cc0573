"""The public service's messages and our nouns say the same, both ways."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given

from cluster.client.generated import generation_pb2
from cluster.core import SpeculationOptions, SpeculationStats, TokenLogprob, token_array
from cluster.errors import RequestError
from cluster.rpc.codec_generation import DELTA, REQUEST, STATS, decode_prompt, decode_request
from cluster.rpc.generation import ChatMessage, ChoiceDelta, GenerationRequest
from tests.support.rpc.frames_strategy import same
from tests.support.rpc.generation_strategy import public_requests


@given(request=public_requests)
def test_every_public_request_survives_the_wire(request: GenerationRequest) -> None:
    message = generation_pb2.GenerateRequest.FromString(REQUEST.encode(request).SerializeToString())
    assert same(decode_request(message), request)


@pytest.mark.parametrize(
    ("field", "number", "what"),
    [
        ("sampling.beam_search.early_stopping", 9, "early_stopping is 9"),
        ("speculation.law", 9, "law is 9"),
        ("speculation.law", 3, "block is gone; rej"),
    ],
)
def test_a_value_that_nobody_knows_is_the_clients_mistake(
    field: str, number: int, what: str
) -> None:
    message = generation_pb2.GenerateRequest(text="hello")
    *path, name = field.split(".")
    setattr(reduce(getattr, path, message), name, number)
    with pytest.raises(RequestError, match=f"{field}: {what}") as raised:
        decode_request(message)
    assert raised.value.param == field


def test_the_prompt_of_a_tokenize_request_is_a_text_or_a_chat() -> None:
    assert decode_prompt(generation_pb2.TokenizeRequest(text="abc")) == "abc"
    turns = [generation_pb2.ChatMessage(role="user", content="hi", name="me")]
    chat = generation_pb2.TokenizeRequest(chat=generation_pb2.ChatMessages(messages=turns))
    assert decode_prompt(chat) == (ChatMessage("user", "hi", "me"),)
    with pytest.raises(RequestError, match="set text or chat") as caught:
        decode_prompt(generation_pb2.TokenizeRequest())
    assert caught.value.param == "prompt"


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
