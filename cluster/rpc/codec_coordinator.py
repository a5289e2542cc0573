"""The frames between ingress and coordinator."""

from __future__ import annotations

from cluster.core import (
    EMPTY_TOKENS,
    FinishReason,
    Request,
    SpeculationOptions,
    SpeculationStats,
    TokenEvent,
)
from cluster.errors import ProtocolError
from cluster.messages import EventFrame, Refusal, SubmitFrame
from cluster.rpc.codec import (
    decode_draft_sources,
    decode_finish,
    decode_logprobs,
    decode_params,
    drafter_names,
    encode_draft_sources,
    encode_finish,
    encode_logprobs,
    encode_params,
    pack_tokens,
    refusal_of,
    unpack_tokens,
)
from cluster.rpc.codec_beams import decode_beam_ends, encode_beam_ends
from cluster.rpc.codec_target import decode_adapters, encode_adapters
from cluster.rpc.frames import Decoded, FrameCodec
from cluster.rpc.generated import coordinator_pb2 as pb


def _encode_speculation(options: SpeculationOptions) -> pb.SpeculationOptions:
    return pb.SpeculationOptions(
        enabled=options.enabled,
        max_draft_tokens=options.max_draft_tokens,
        drafters=drafter_names(options.drafters),
        latency_class=options.latency_class,
        return_draft_sources=options.return_draft_sources,
    )


def _decode_speculation(message: pb.SpeculationOptions) -> SpeculationOptions:
    has = message.HasField
    return SpeculationOptions(
        enabled=message.enabled,
        max_draft_tokens=message.max_draft_tokens if has("max_draft_tokens") else None,
        drafters=tuple(message.drafters.names) if has("drafters") else None,
        latency_class=message.latency_class if has("latency_class") else None,
        return_draft_sources=message.return_draft_sources,
    )


def _encode_stats(stats: SpeculationStats) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        num_steps=stats.num_steps,
        num_spec_steps=stats.num_spec_steps,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
        acceptance_histogram=stats.acceptance_histogram,
        accepted_by_drafter=stats.accepted_by_drafter,
        verified_by_drafter=stats.verified_by_drafter,
        shared_by_drafter=stats.shared_by_drafter,
        decode_time_s=stats.decode_time_s,
        idle_because=stats.idle_because,
    )


def _decode_stats(message: pb.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        num_steps=message.num_steps,
        num_spec_steps=message.num_spec_steps,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_draft_tokens=message.num_accepted_draft_tokens,
        acceptance_histogram=tuple(message.acceptance_histogram),
        accepted_by_drafter=dict(message.accepted_by_drafter),
        verified_by_drafter=dict(message.verified_by_drafter),
        shared_by_drafter=dict(message.shared_by_drafter),
        decode_time_s=message.decode_time_s,
        idle_because=message.idle_because,
    )


def _encode_request(request: Request) -> pb.Request:
    return pb.Request(
        id=request.id,
        prompt_ids=pack_tokens(request.prompt_ids),
        params=encode_params(request.params),
        task=request.task,
        speculation=_encode_speculation(request.speculation),
        output_ids=pack_tokens(request.output_ids),
        was_admitted=request.was_admitted,
        tenant=request.tenant,
        adapter=request.adapter,
    )


def _decode_request(message: pb.Request) -> Request:
    prompt_ids = unpack_tokens(message.prompt_ids, "prompt_ids")
    if not len(prompt_ids):
        raise ProtocolError("prompt_ids is empty; send at least one token")
    for field in ("params", "speculation"):
        # Absent they would read as zeros, which are meaningful values here.
        if not message.HasField(field):
            raise ProtocolError(f"{field} is absent; send the request's own")
    return Request(
        id=message.id,
        prompt_ids=prompt_ids,
        params=decode_params(message.params),
        task=message.task,
        speculation=_decode_speculation(message.speculation),
        output_ids=unpack_tokens(message.output_ids, "output_ids"),
        was_admitted=message.was_admitted,
        tenant=message.tenant,
        adapter=message.adapter,
    )


def _encode_submit(frame: SubmitFrame) -> pb.SubmitFrame:
    return pb.SubmitFrame(requests=map(_encode_request, frame.requests), cancelled=frame.cancelled)


def _decode_submit(message: pb.SubmitFrame) -> Decoded[SubmitFrame]:
    requests: list[Request] = []
    refusals: list[Refusal] = []
    for request in message.requests:
        try:
            requests.append(_decode_request(request))
        except ProtocolError as error:
            refusals.append(refusal_of(request.id, 0, error))
    return Decoded(SubmitFrame(tuple(requests), tuple(message.cancelled)), tuple(refusals))


def _encode_event(event: TokenEvent) -> pb.TokenEvent:
    return pb.TokenEvent(
        request_id=event.request_id,
        position=event.position,
        token_ids=pack_tokens(event.token_ids),
        logprobs=encode_logprobs(event.logprobs),
        finish_reason=encode_finish(event.finish_reason),
        stats=None if event.stats is None else _encode_stats(event.stats),
        error_code=event.error_code,
        error_message=event.error_message,
        retry_after_s=event.retry_after_s,
        draft_sources=encode_draft_sources(event.draft_sources),
        queue_time_s=event.queue_time_s,
        num_cached=event.num_cached,
        beams=encode_beam_ends(event.beams),
    )


def _decode_event(message: pb.TokenEvent) -> TokenEvent:
    token_ids = unpack_tokens(message.token_ids, "token_ids")
    logprobs = decode_logprobs(message.logprobs) if message.HasField("logprobs") else ()
    if logprobs and len(logprobs) != len(token_ids):
        raise ProtocolError(f"event has {len(token_ids)} tokens and {len(logprobs)} logprobs")
    draft_sources = decode_draft_sources(message.draft_sources)
    if draft_sources and len(draft_sources) != len(token_ids):
        raise ProtocolError(f"event has {len(token_ids)} tokens and {len(draft_sources)} sources")
    return TokenEvent(
        request_id=message.request_id,
        position=message.position,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=decode_finish(message.finish_reason),
        stats=_decode_stats(message.stats) if message.HasField("stats") else None,
        error_code=message.error_code,
        error_message=message.error_message,
        retry_after_s=message.retry_after_s,
        draft_sources=draft_sources,
        queue_time_s=message.queue_time_s,
        num_cached=message.num_cached,
        beams=decode_beam_ends(message.beams, token_ids),
    )


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


def _encode_events(frame: EventFrame) -> pb.EventFrame:
    return pb.EventFrame(
        events=map(_encode_event, frame.events), adapters=encode_adapters(frame.adapters)
    )


def _decode_events(message: pb.EventFrame) -> Decoded[EventFrame]:
    events: list[TokenEvent] = []
    for event in message.events:
        try:
            events.append(_decode_event(event))
        except ProtocolError as error:
            # Tokens are missing from here on, so the text cannot go on: the request ends.
            refusal = refusal_of(event.request_id, 0, error)
            events.append(error_event(refusal, event.position))
    adapters = decode_adapters(message.adapters) if message.HasField("adapters") else None
    return Decoded(EventFrame(tuple(events), adapters))


SUBMIT = FrameCodec("SubmitFrame", _encode_submit, _decode_submit, pb.SubmitFrame.FromString)
EVENT = FrameCodec("EventFrame", _encode_events, _decode_events, pb.EventFrame.FromString)
