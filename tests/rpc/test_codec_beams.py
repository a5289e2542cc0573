"""A beam search and its texts on the wire."""

from __future__ import annotations

from cluster.core import TokenEvent, TokenLogprob, token_array
from cluster.messages import EventFrame, TextVerdict, VerdictFrame
from cluster.plan.texts import NO_SOURCES
from cluster.requests.fields import BeamEnd
from cluster.rpc.conversations import EVENT, VERDICT
from cluster.rpc.generated import coordinator_pb2

ENDS = (BeamEnd(2, True, -1.5, -0.75), BeamEnd(0, True, -2.0, -2.0), BeamEnd(1, False, -4.0, -4.0))


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
