"""The public Generation service's messages and our nouns for them, both ways.

Decoding raises RequestError naming the field: here the peer is a caller, not a colleague.
"""

from __future__ import annotations

from typing import Any

from cluster.client.generated import generation_pb2
from cluster.core import SpeculationOptions, SpeculationStats
from cluster.errors import ProtocolError, RequestError
from cluster.requests.beam_spec import BeamSpec
from cluster.rpc.codec import (
    decode_grammar,
    encode_draft_sources,
    encode_finish,
    encode_logprobs,
    read_tokens,
)
from cluster.rpc.codec_beams import decode_beam_spec
from cluster.rpc.generation import (
    ChatMessage,
    GenerationRequest,
    GenerationResponse,
    ResumedChoice,
    SamplingOptions,
)

OPTIONAL_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "max_tokens", "min_tokens", "logprobs",
    "prompt_logprobs",
)  # fmt: skip


def decode_request(message: generation_pb2.GenerateRequest) -> GenerationRequest:
    """Raises RequestError where the prompt is absent.

    Ranges are not checked: those are the ingress's, the same for HTTP and gRPC.
    """
    sampling = message.sampling
    return GenerationRequest(
        model=message.model,
        prompt=_decode_prompt(message),
        sampling=SamplingOptions(
            **{
                name: getattr(sampling, name)
                for name in OPTIONAL_SAMPLING
                if sampling.HasField(name)
            },
            logit_bias=dict(sampling.logit_bias),
            stop=tuple(sampling.stop),
            include_stop=sampling.include_stop,
            stop_token_ids=tuple(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            grammar=decode_grammar(sampling.grammar) if sampling.HasField("grammar") else None,
            beam_search=_decode_beams(sampling),
        ),
        n=message.n or 1,
        speculation=_decode_speculation(message.speculation),
        metadata=dict(message.metadata),
        resume=tuple(
            ResumedChoice(choice.index, read_tokens(choice.token_ids), choice.finished)
            for choice in message.resume
        ),
        request_id=message.request_id,
        cache_salt=message.cache_salt,
        prediction=message.prediction,
    )


def encode_response(response: GenerationResponse) -> generation_pb2.GenerateResponse:
    """One piece of the stream."""
    usage, stats = response.usage, response.speculative_decoding
    return generation_pb2.GenerateResponse(
        id=response.id,
        model=response.model,
        seed=response.seed,
        choices=[
            generation_pb2.ChoiceDelta(
                index=choice.index,
                text=choice.text,
                token_ids=choice.token_ids.tolist(),
                logprobs=encode_logprobs(choice.logprobs),
                finish_reason=encode_finish(choice.finish_reason),
                stop=choice.stop,
                draft_sources=encode_draft_sources(choice.draft_sources),
                cumulative_logprob=choice.cumulative_logprob,
            )
            for choice in response.choices
        ],
        usage=None
        if usage is None
        else generation_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        speculative_decoding=None
        if stats is None
        else _encode_stats(stats, response.prediction_idle_because),
        prompt_logprobs=encode_logprobs(response.prompt_logprobs),
    )


def _decode_prompt(message: generation_pb2.GenerateRequest) -> Any:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "tokens":
        return read_tokens(message.tokens.token_ids)
    if kind == "chat":
        return tuple(
            ChatMessage(turn.role, turn.content, turn.name) for turn in message.chat.messages
        )
    raise RequestError("prompt: absent; set text, chat or tokens", param="prompt")


def _decode_beams(sampling: generation_pb2.SamplingOptions) -> BeamSpec | None:
    """num_beams 0 = n."""
    if not sampling.HasField("beam_search"):
        return None
    try:
        return decode_beam_spec(sampling.beam_search)
    except ProtocolError as error:
        name = "sampling.beam_search.early_stopping"
        raise RequestError(f"{name}: {error.message}", param=name) from None


def _decode_speculation(message: generation_pb2.SpeculationRequest) -> SpeculationOptions:
    has = message.HasField
    return SpeculationOptions(
        enabled=message.enabled if has("enabled") else True,
        max_draft_tokens=message.max_draft_tokens if has("max_draft_tokens") else None,
        drafters=tuple(message.drafters.names) if has("drafters") else None,
        latency_class=message.latency_class if has("latency_class") else None,
        return_draft_sources=message.return_draft_sources,
    )


def _encode_stats(
    stats: SpeculationStats, prediction_idle_because: str
) -> generation_pb2.SpeculativeDecoding:
    return generation_pb2.SpeculativeDecoding(
        mean_acceptance_length=stats.mean_acceptance_length,
        draft_acceptance_rate=stats.draft_acceptance_rate,
        acceptance_histogram=stats.acceptance_histogram,
        num_spec_steps=stats.num_spec_steps,
        num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
        num_draft_tokens=stats.num_draft_tokens,
        num_spec_tokens=stats.num_spec_tokens,
        num_steps=stats.num_steps,
        accepted_by_drafter=stats.accepted_by_drafter,
        shared_by_drafter=stats.shared_by_drafter,
        decode_time_s=stats.decode_time_s,
        idle_because=stats.idle_because,
        prediction_idle_because=prediction_idle_because,
    )
