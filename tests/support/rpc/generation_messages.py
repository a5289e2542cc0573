"""The client's half of the codec: what the ingress reads and writes, the other way round."""

from __future__ import annotations

import numpy as np

from cluster.client.generated import generation_pb2
from cluster.core import SpeculationOptions, SpeculationStats
from cluster.rpc.codec import (
    decode_draft_sources,
    decode_finish,
    decode_logprobs,
    drafter_names,
    encode_grammar,
    read_tokens,
)
from cluster.rpc.codec_generation import OPTIONAL_SAMPLING
from cluster.rpc.generation import (
    ChoiceDelta,
    GenerationRequest,
    GenerationResponse,
    SamplingOptions,
    Usage,
)


def encode_request(request: GenerationRequest) -> generation_pb2.GenerateRequest:
    """As a client builds it; raises ValueError for a value that the message cannot hold."""
    message = generation_pb2.GenerateRequest(
        model=request.model,
        sampling=_encode_sampling(request.sampling),
        n=request.n,
        speculation=_encode_speculation(request.speculation),
        metadata=request.metadata,
        resume=[
            generation_pb2.ResumedChoice(
                index=choice.index,
                token_ids=choice.token_ids.tolist(),
                finished=choice.is_finished,
            )
            for choice in request.resume
        ],
        request_id=request.request_id,
        cache_salt=request.cache_salt,
        prediction=request.prediction,
    )
    if isinstance(request.prompt, str):
        message.text = request.prompt
    elif isinstance(request.prompt, np.ndarray):
        message.tokens.SetInParent()
        message.tokens.token_ids.extend(request.prompt.tolist())
    else:
        message.chat.SetInParent()
        for turn in request.prompt:
            message.chat.messages.add(role=turn.role, content=turn.content, name=turn.name)
    return message


def decode_response(message: generation_pb2.GenerateResponse) -> GenerationResponse:
    """Raises ProtocolError for a response that cannot be understood."""
    usage = message.usage
    return GenerationResponse(
        id=message.id,
        model=message.model,
        seed=message.seed,
        choices=tuple(map(_decode_choice, message.choices)),
        usage=Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.accepted_prediction_tokens,
            usage.rejected_prediction_tokens,
            usage.cached_tokens,
        )
        if message.HasField("usage")
        else None,
        speculative_decoding=_decode_stats(message.speculative_decoding)
        if message.HasField("speculative_decoding")
        else None,
        prompt_logprobs=decode_logprobs(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else (),
        prediction_idle_because=message.speculative_decoding.prediction_idle_because,
    )


def _encode_sampling(options: SamplingOptions) -> generation_pb2.SamplingOptions:
    return generation_pb2.SamplingOptions(
        **{name: getattr(options, name) for name in OPTIONAL_SAMPLING},
        logit_bias=options.logit_bias,
        stop=options.stop,
        include_stop=options.include_stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        grammar=None if options.grammar is None else encode_grammar(options.grammar),
    )


def _encode_speculation(options: SpeculationOptions) -> generation_pb2.SpeculationRequest:
    return generation_pb2.SpeculationRequest(
        enabled=options.enabled,
        max_draft_tokens=options.max_draft_tokens,
        drafters=drafter_names(options.drafters),
        latency_class=options.latency_class,
        return_draft_sources=options.return_draft_sources,
    )


def _decode_choice(message: generation_pb2.ChoiceDelta) -> ChoiceDelta:
    return ChoiceDelta(
        index=message.index,
        text=message.text,
        token_ids=read_tokens(message.token_ids),
        logprobs=decode_logprobs(message.logprobs) if message.HasField("logprobs") else (),
        finish_reason=decode_finish(message.finish_reason),
        stop=message.stop if message.HasField("stop") else None,
        draft_sources=decode_draft_sources(message.draft_sources),
        cumulative_logprob=(
            message.cumulative_logprob if message.HasField("cumulative_logprob") else None
        ),
    )


def _decode_stats(message: generation_pb2.SpeculativeDecoding) -> SpeculationStats:
    return SpeculationStats(
        num_steps=message.num_steps,
        num_spec_steps=message.num_spec_steps,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_draft_tokens=message.num_accepted_draft_tokens,
        acceptance_histogram=tuple(message.acceptance_histogram),
        accepted_by_drafter=dict(message.accepted_by_drafter),
        shared_by_drafter=dict(message.shared_by_drafter),
        decode_time_s=message.decode_time_s,
        idle_because=message.idle_because,
    )
