"""The frames between ingress and coordinator."""

from __future__ import annotations

from cluster.core import EMPTY_TOKENS, FinishReason, Request, TokenEvent
from cluster.errors import ProtocolError
from cluster.messages import EventFrame, Refusal, SubmitFrame
from cluster.rpc.codec import PARTS
from cluster.rpc.codec_records import record_codec
from cluster.rpc.frames import FrameCodec, refusal_of
from cluster.rpc.generated import coordinator_pb2 as pb

_REQUEST = record_codec(Request, pb.Request, PARTS)
_EVENT = record_codec(TokenEvent, pb.TokenEvent, PARTS)


def _decode_request(message: pb.Request) -> Request | Refusal:
    try:
        if not message.prompt_ids:
            raise ProtocolError("prompt_ids is empty; send at least one token")
        for field in ("params", "speculation"):
            # Absent they would read as defaults, which are meaningful values here.
            if not message.HasField(field):
                raise ProtocolError(f"{field} is absent; send the request's own")
        return _REQUEST.decode(message)
    except ProtocolError as error:
        return refusal_of(message.id, 0, error)


def _decode_event(message: pb.TokenEvent) -> TokenEvent:
    try:
        event = _EVENT.decode(message)
        num_tokens = len(event.token_ids)
        for what, items in (("logprobs", event.logprobs), ("sources", event.draft_sources)):
            if items and len(items) != num_tokens:
                raise ProtocolError(f"event has {num_tokens} tokens and {len(items)} {what}")
        num_ended = sum(end.num_tokens for end in event.beams)
        if event.beams and num_ended != num_tokens:
            raise ProtocolError(f"event has {num_tokens} tokens, its beams {num_ended}")
        return event
    except ProtocolError as error:
        # Tokens are missing from here on, so the text cannot go on: the request ends.
        return error_event(refusal_of(message.request_id, 0, error), message.position)


def error_event(refusal: Refusal, position: int = 0) -> TokenEvent:
    """The event that ends a request which was refused."""
    return TokenEvent(
        request_id=refusal.request_id,
        position=position,
        token_ids=EMPTY_TOKENS,
        finish_reason=FinishReason.ERROR,
        error_code=refusal.code,
        error_message=refusal.message,
    )


SUBMIT = FrameCodec(SubmitFrame, pb.SubmitFrame, [_REQUEST.read_by(_decode_request)])
EVENT = FrameCodec(EventFrame, pb.EventFrame, [_EVENT.read_by(_decode_event)])
