"""The public service's messages and our nouns say the same, both ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from cluster.client.generated import common_pb2, generation_pb2
from cluster.core import (
    SpeculationOptions,
    SpeculationStats,
    TokenLogprob,
    token_array,
)
from cluster.errors import RequestError
from cluster.requests.fields import BeamSpec, GrammarSpec
from cluster.rpc.codec_generation import REQUEST, RESPONSE, decode_request
from cluster.rpc.generation import (
    ChatMessage,
    ChoiceDelta,
    GenerationRequest,
    GenerationResponse,
    ResumedChoice,
    SamplingOptions,
    Usage,
)
from tests.support.rpc.frames_strategy import same
from tests.support.rpc.generation_strategy import public_requests


@given(request=public_requests)
def test_every_public_request_survives_the_wire(request: GenerationRequest) -> None:
    message = generation_pb2.GenerateRequest.FromString(REQUEST.encode(request).SerializeToString())
    assert same(decode_request(message), request)


def test_a_clients_request_is_read_field_by_field() -> None:
    message = generation_pb2.GenerateRequest(
        model="toy",
        chat=generation_pb2.ChatMessages(
            messages=[generation_pb2.ChatMessage(role="user", content="hi", name="me")]
        ),
        sampling=generation_pb2.SamplingOptions(
            temperature=0.0,
            top_p=0.5,
            logit_bias={7: -1.5},
            stop=["x"],
            include_stop=True,
            stop_token_ids=[3],
            logprobs=0,
            grammar=common_pb2.Grammar(kind="regex", source="a*", reasoning_end=[9]),
            beam_search=common_pb2.BeamSearch(
                num_beams=4, early_stopping=common_pb2.EARLY_STOPPING_NEVER
            ),
        ),
        n=2,
        speculation=generation_pb2.SpeculationRequest(drafters=common_pb2.DrafterNames()),
        metadata={"task": "code"},
        resume=[generation_pb2.ResumedChoice(index=1, token_ids=[4, 5], finished=True)],
        request_id="r",
        cache_salt="s",
        prediction="p",
    )
    expected = GenerationRequest(
        "toy",
        (ChatMessage("user", "hi", "me"),),
        SamplingOptions(
            temperature=0.0,
            top_p=0.5,
            logit_bias={7: -1.5},
            stop=("x",),
            include_stop=True,
            stop_token_ids=(3,),
            logprobs=0,
            grammar=GrammarSpec("regex", "a*", (), (9,)),
            beam_search=BeamSpec(4, 1.0, "never"),
        ),
        2,
        SpeculationOptions(drafters=()),
        {"task": "code"},
        (ResumedChoice(1, token_array([4, 5]), is_finished=True),),
        "r",
        "s",
        "p",
    )
    assert same(decode_request(message), expected)


@pytest.mark.parametrize(
    "sampling",
    [SamplingOptions(top_k=-1), SamplingOptions(seed=2**64), SamplingOptions(logprobs=-2)],
)
def test_a_value_the_message_cannot_hold_is_no_request(sampling: SamplingOptions) -> None:
    with pytest.raises(ValueError, match="out of range"):
        REQUEST.encode(GenerationRequest("toy", "prompt", sampling))


def test_a_request_without_a_prompt_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="set text, chat or tokens") as raised:
        decode_request(generation_pb2.GenerateRequest(model="toy"))
    assert raised.value.param == "prompt"


def test_a_field_that_is_gone_is_refused_by_name() -> None:
    former = generation_pb2.SpeculationRequest.FromString(b"\x31" + bytes(8))  # double, number 6
    with pytest.raises(RequestError, match=r"use speculation\.latency_class") as raised:
        decode_request(generation_pb2.GenerateRequest(text="a", speculation=former))
    assert raised.value.param == "speculation.min_tokens_per_s"


def test_absent_speculation_means_enabled() -> None:
    bare = generation_pb2.GenerateRequest(model="toy", text="a")
    assert decode_request(bare).speculation == SpeculationOptions()


def test_the_last_response_brings_usage_and_what_speculation_did() -> None:
    stats = SpeculationStats(
        9, 2, 8, 3, (1, 0, 0, 1), {"lm": 2, "suffix": 1}, "", {}, {"suffix": 1}, 0.25
    )
    delta = ChoiceDelta(
        2,
        "x",
        token_array([7, 9]),
        (TokenLogprob(-0.5, ((1, -0.5),)), TokenLogprob(-2.0)),
        draft_sources=(("lm", "suffix"), ()),
        cumulative_logprob=-2.5,
    )
    message = RESPONSE.encode(
        GenerationResponse("id", "toy", 1, (delta,), Usage(1, 2, 3, 4), stats)
    )

    (choice,) = message.choices
    assert (choice.index, choice.text, [*choice.token_ids]) == (2, "x", [7, 9])
    assert [[*names.names] for names in choice.draft_sources] == [["lm", "suffix"], []]
    assert choice.cumulative_logprob == -2.5
    assert not choice.HasField("stop")
    assert [*choice.logprobs.num_top] == [1, 0]
    assert message.usage.completion_tokens == 2
    sent = message.speculative_decoding
    assert (sent.num_steps, sent.num_spec_tokens) == (9, 3)
    assert dict(sent.accepted_by_drafter) == {"lm": 2, "suffix": 1}
    assert sent.mean_acceptance_length == 2.5
    assert sent.draft_acceptance_rate == 0.375
    read = RESPONSE.decode(message)
    assert read.speculative_decoding == stats
    assert read.usage == Usage(1, 2, 3, 4)
    assert same(read.choices, (delta,))


def test_a_response_without_news_has_neither() -> None:
    read = RESPONSE.decode(RESPONSE.encode(GenerationResponse("id", "toy", 1)))
    assert (read.choices, read.usage, read.speculative_decoding) == ((), None, None)


def test_a_prompt_of_tokens_stays_one_though_it_is_empty() -> None:
    message = REQUEST.encode(GenerationRequest("toy", token_array([])))
    prompt = decode_request(message).prompt
    assert isinstance(prompt, np.ndarray)
    assert (len(prompt), prompt.dtype) == (0, np.int32)


def test_zero_choices_on_the_wire_are_one() -> None:
    bare = generation_pb2.GenerateRequest(model="toy", text="a")
    assert decode_request(bare).n == 1
