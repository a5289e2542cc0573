"""A beam search and its texts on the wire."""

from __future__ import annotations

import pytest

from cluster.client import GenerateRequest, SamplingOptions
from cluster.client.generated import generation_pb2 as pb
from cluster.core import TokenEvent, TokenLogprob, token_array
from cluster.errors import RequestError
from cluster.messages import EventFrame, TextVerdict, VerdictFrame
from cluster.plan.texts import NO_SOURCES
from cluster.requests.fields import BeamEnd, BeamSpec
from cluster.rpc.codec import BEAM_SPEC
from cluster.rpc.codec_generation import decode_prompt, decode_request
from cluster.rpc.conversations import EVENT, VERDICT
from cluster.rpc.generated import coordinator_pb2
from cluster.rpc.generation import ChatMessage

ENDS = (BeamEnd(2, True, -1.5, -0.75), BeamEnd(0, True, -2.0, -2.0), BeamEnd(1, False, -4.0, -4.0))


def asked(spec: BeamSpec | None) -> GenerateRequest:
    sampling = SamplingOptions(beam_search=spec and BEAM_SPEC.encode(spec))
    return GenerateRequest(model="m", text="hello", sampling=sampling)


def test_a_way_of_stopping_that_nobody_knows_is_the_clients_mistake() -> None:
    message = asked(BeamSpec(2))
    message.sampling.beam_search.early_stopping = 9
    with pytest.raises(RequestError, match="early_stopping is 9"):
        decode_request(message)


def test_texts_survive_both_ways_from_target_to_ingress() -> None:
    logprobs = tuple(TokenLogprob(-0.5) for _ in range(3))
    verdict = TextVerdict(
        "a", 1, 3, token_array([5, 6, 7]), NO_SOURCES, logprobs=logprobs, beams=ENDS
    )
    found = VERDICT.decode(VERDICT.encode(VerdictFrame((verdict,)))[0]).frame.verdicts[0]
    assert found.beams == ENDS
    assert found.token_ids.tolist() == [5, 6, 7]
    assert found.logprobs == logprobs
    event = TokenEvent("a", 0, token_array([5, 6, 7]), beams=ENDS)
    assert EVENT.decode(EVENT.encode(EventFrame((event,)))[0]).frame.events[0].beams == ENDS


def test_texts_of_more_tokens_than_came_end_the_request_with_an_error() -> None:
    event = TokenEvent("a", 0, token_array([5, 6, 7]), beams=ENDS)
    message = coordinator_pb2.EventFrame.FromString(EVENT.encode(EventFrame((event,)))[0])
    message.events[0].beams[2].num_tokens = 2
    (found,) = EVENT.decode(message.SerializeToString()).frame.events
    assert found.error_message == "event has 3 tokens, its beams 4"


def test_the_prompt_of_a_tokenize_request_is_a_text_or_a_chat() -> None:
    assert decode_prompt(pb.TokenizeRequest(text="abc")) == "abc"
    turns = [pb.ChatMessage(role="user", content="hi", name="me")]
    chat = pb.TokenizeRequest(chat=pb.ChatMessages(messages=turns))
    assert decode_prompt(chat) == (ChatMessage("user", "hi", "me"),)
    with pytest.raises(RequestError, match="set text or chat") as caught:
        decode_prompt(pb.TokenizeRequest())
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(("number", "what"), [(9, "law is 9"), (3, "block is gone; rej")])
def test_a_law_that_nobody_knows_is_the_clients_mistake(number: int, what: str) -> None:
    message = asked(None)
    message.speculation.law = number  # type: ignore[assignment]
    with pytest.raises(RequestError, match=rf"speculation\.law: {what}") as raised:
        decode_request(message)
    assert raised.value.param == "speculation.law"
