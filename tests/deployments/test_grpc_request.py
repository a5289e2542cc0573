"""gRPC requests to validated specifications, and what calls are answered."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cluster.client import (
    ChatMessage,
    ChatMessages,
    DrafterNames,
    GenerateRequest,
    Grammar,
    ResumedChoice,
    SamplingOptions,
    SpeculationRequest,
    TokenIds,
    TokenizeRequest,
)
from cluster.client.generated.common_pb2 import BeamSearch
from cluster.core import SpeculationOptions, SpeculationStats, TokenLogprob, token_array
from cluster.errors import RequestError
from cluster.text.tool_calls.base import Part
from deployments.ingress.choice import Delta
from deployments.ingress.grpc_api import DELTA, STATS
from deployments.ingress.grpc_request import prompt_of, request_name, to_spec
from deployments.ingress.openai_request import CompletionBody
from deployments.ingress.wording import Names
from tests.deployments.test_openai_request import LIMITS, PLAIN, completion, refused
from tests.support.rpc.frames_strategy import same

# What a call and a body may say alike.
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.25,
    "presence_penalty": -1.0,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.1,
    "seed": 2**64 - 1,
    "min_tokens": 2,
    "max_tokens": 8,
    "ignore_eos": True,
    "logprobs": 0,
    "prompt_logprobs": 1,
    "stop": ["x", "y"],
    "stop_token_ids": [3],
}
SPECULATION = {"max_draft_tokens": 0}
ASKED = {"return_draft_sources": True, "return_draft_trees": True}
SAID = {"n": 2, "metadata": {"task": "code"}, "cache_salt": "secret"}
CALL = GenerateRequest(
    model="demo",
    text="hello",
    sampling=SamplingOptions(**SAMPLING, logit_bias={5: 1.0, 2: -1.0}, include_stop=True),
    speculation=SpeculationRequest(
        **SPECULATION,
        **ASKED,
        law=1,
        drafters=DrafterNames(names=["lm"]),
    ),
    **SAID,
)


def test_a_call_and_a_body_that_say_the_same_ask_for_the_same():
    body = completion(
        **SAMPLING,
        **SAID,
        **ASKED,
        logit_bias={"5": 1.0, "2": -1.0},
        include_stop_str_in_output=True,
        speculation={**SPECULATION, "law": "rejection", "drafters": ["lm"]},
    )
    spec, other = to_spec(CALL, LIMITS), CompletionBody.parse(body, LIMITS).spec
    for name in type(spec).__slots__:
        if name not in ("prompts", "default_max_tokens", "names"):
            assert getattr(spec, name) == getattr(other, name), name
    assert spec.prompts[0].text == other.prompts[0].text


def test_what_a_call_leaves_out_has_its_default():
    spec = to_spec(GenerateRequest(model="demo", text="a"), LIMITS)
    assert spec.params == PLAIN.params
    assert (spec.num_choices, spec.speculation) == (1, SpeculationOptions())
    nobody = SpeculationRequest(drafters=DrafterNames())
    asked = to_spec(GenerateRequest(model="demo", text="a", speculation=nobody), LIMITS)
    assert asked.speculation.drafters == ()


def test_a_request_keeps_its_id_or_gets_one():
    assert request_name("mine") == "mine"
    assert len({request_name("") for _ in range(2)}) == 2


@pytest.mark.parametrize("name", ["x" * 129, "two\nlines"])
def test_an_invalid_request_id_is_refused(name: str):
    with pytest.raises(RequestError, match="at most 128 printable") as caught:
        request_name(name)
    assert caught.value.param == "request_id"


def test_a_resumption_may_have_no_tokens_yet():
    resume = [ResumedChoice(index=1), ResumedChoice(index=0, token_ids=[3], finished=True)]
    found = to_spec(GenerateRequest(model="demo", text="x", n=2, resume=resume), LIMITS).resumed
    said = {index: (one.token_ids.tolist(), one.is_finished) for index, one in found.items()}
    assert said == {1: ([], False), 0: ([3], True)}


def test_the_prompt_is_a_text_a_chat_or_tokens():
    assert prompt_of(TokenizeRequest(text="abc"), LIMITS).text == "abc"
    turns = [ChatMessage(role="user", content="hi", name="me")]
    chat = prompt_of(TokenizeRequest(chat=ChatMessages(messages=turns)), LIMITS)
    assert chat.messages == ({"role": "user", "content": "hi", "name": "me"},)
    tokens = prompt_of(GenerateRequest(tokens=TokenIds(token_ids=[4, 5])), LIMITS).token_ids
    assert (tokens.tolist(), tokens.dtype) == ([4, 5], np.int32)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (TokenizeRequest(), "prompt: absent; set text or chat"),
        (GenerateRequest(), "prompt: absent; set text, chat or tokens"),
        (GenerateRequest(text=""), "text: empty"),
        (GenerateRequest(tokens=TokenIds()), "tokens: empty"),
        (GenerateRequest(tokens=TokenIds(token_ids=[LIMITS.vocab_size])), "tokens: token id 100"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(message: Any, said: str):
    error = refused(prompt_of, message, LIMITS)
    assert error.message.startswith(said)
    assert error.param == said.partition(":")[0]


# A field of type double and of number 6, which was min_tokens_per_s.
FORMER = SpeculationRequest.FromString(b"\x31" + bytes(8))


def call(
    resume: Sequence[tuple[int, list[int]]] = (),
    n: int = 1,
    speculation: SpeculationRequest | None = None,
    **sampling: Any,
) -> GenerateRequest:
    choices = [ResumedChoice(index=index, token_ids=ids) for index, ids in resume]
    options = SamplingOptions(**sampling)
    return GenerateRequest(
        model="demo", text="x", sampling=options, n=n, resume=choices, speculation=speculation
    )


BEAMS = {"beam_search": BeamSearch(num_beams=2), "max_tokens": 5}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (call(temperature=9.0), "sampling.temperature"),
        (call(max_tokens=0), "sampling.max_tokens"),
        (call(stop=[""]), "sampling.stop"),
        (call(logit_bias={999: 1.0}), "sampling.logit_bias"),
        (call(grammar=Grammar(kind="poem", source="x")), "sampling.grammar.kind"),
        (call([(0, [5]), (0, [6])], n=2), "resume"),
        (call([(2, [5])], n=2), "resume"),
        (call([(1, [5]), (0, [5, LIMITS.vocab_size])], n=2), "resume[1].token_ids"),
        (call([(0, [-1])], n=2), "resume[0].token_ids"),
        (call([(0, [1])], **BEAMS), "resume"),
        (call(n=3, **BEAMS), "sampling.beam_search.num_beams"),
        # What this version does not know.
        (
            call(speculation=FORMER),
            "speculation.min_tokens_per_s ... use speculation.latency_class",
        ),
        (call(speculation=SpeculationRequest(law=9)), "speculation.law ... law is 9"),
        (
            call(beam_search=BeamSearch(early_stopping=9)),
            "sampling.beam_search.early_stopping ... early_stopping is 9",
        ),
    ],
)
def test_a_call_names_the_field_of_its_message(asked: GenerateRequest, told: str):
    param, *words = told.split(" ... ")
    error = refused(to_spec, asked, LIMITS)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert all(word in error.message for word in words)


def test_what_a_call_turns_out_to_lack_later_has_its_messages_name():
    names = to_spec(call(grammar=Grammar(kind="regex", source="(a")), LIMITS).names
    known = ("grammar", "prompt", "max_tokens")
    assert [names.of(name) for name in known] == [
        "sampling.grammar.source",
        "text",
        "sampling.max_tokens",
    ]
    tokens = GenerateRequest(tokens=TokenIds(token_ids=[1]))
    assert prompt_of(tokens, LIMITS).names["prompt"] == "tokens"
    turns = [ChatMessage(role=role, content="x") for role in ("user", "function")]
    chats = [GenerateRequest(chat=ChatMessages(messages=each)) for each in (turns, turns[:1])]
    assert refused(prompt_of, chats[0], LIMITS).param == "chat.messages[1].role"
    assert (
        Names(prompt_of(chats[1], LIMITS).names).of("messages[0].role") == "chat.messages[0].role"
    )


def test_a_choice_travels_with_its_tokens_and_says_nothing_of_what_it_lacks():
    delta = Delta(
        2,
        Part("x"),
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


def test_what_speculation_did_is_told_with_its_rates():
    stats = SpeculationStats(
        9, 2, 8, 3, (1, 0, 0, 1), {"lm": 2, "suffix": 1}, "", {}, {"suffix": 1}, 0.25
    )
    sent = STATS.encode(stats)
    assert (sent.num_steps, sent.num_spec_tokens) == (9, 3)
    assert dict(sent.accepted_by_drafter) == {"lm": 2, "suffix": 1}
    assert sent.mean_acceptance_length == 2.5
    assert sent.draft_acceptance_rate == 0.375
    assert same(STATS.decode(sent), stats)
