"""Core nouns to protobuf and back: the pieces that several frames share.

Arrays travel as packed little-endian bytes and are read without a copy, so decoded arrays are
read-only views.  Decoding raises ProtocolError for what cannot be a noun at all (byte lengths
that do not fit); whether a tree makes sense is `spec.tree.check_tree`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.core import (
    EMPTY_FLOATS,
    EMPTY_TOKENS,
    EMPTY_TREE,
    FinishReason,
    FloatArray,
    Refusal,
    SamplingParams,
    SpeculationOptions,
    SpeculationStats,
    TokenArray,
    TokenLogprob,
    TokenTree,
    WorkerDescription,
)
from cluster.errors import ProtocolError
from cluster.rpc.generated import common_pb2 as pb

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_MASK64 = (1 << 64) - 1

_FINISH_TO_WIRE = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_WIRE: dict[int, FinishReason | None] = {
    value: reason for reason, value in _FINISH_TO_WIRE.items()
}


def pack_tokens(array: TokenArray) -> bytes:
    """int32[n] as i32[]."""
    return array.astype(_INT32, copy=False).tobytes()


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Plain integers as i32[]; raises OverflowError beyond 32 bits."""
    return np.array(token_ids, dtype=_INT32).tobytes() if token_ids else b""


def unpack_tokens(data: bytes, field: str) -> TokenArray:
    """i32[] as a read-only view; field names it in the ProtocolError."""
    if not data:
        return EMPTY_TOKENS
    if len(data) % 4:
        raise ProtocolError(f"{field} has {len(data)} bytes; i32[] takes a multiple of 4")
    return np.frombuffer(data, dtype=_INT32)


def unpack_floats(data: bytes, field: str) -> FloatArray:
    """f32[] as a read-only view; field names it in the ProtocolError."""
    if not data:
        return EMPTY_FLOATS
    if len(data) % 4:
        raise ProtocolError(f"{field} has {len(data)} bytes; f32[] takes a multiple of 4")
    return np.frombuffer(data, dtype=_FLOAT32)


def pack_floats(array: FloatArray) -> bytes:
    """float32[n] as f32[]."""
    return array.astype(_FLOAT32, copy=False).tobytes()


def encode_tree(tree: TokenTree) -> pb.TokenTree:
    return pb.TokenTree(token_ids=pack_tokens(tree.token_ids), parents=pack_tokens(tree.parents))


def decode_tree(message: pb.TokenTree) -> TokenTree:
    """A tree whose two arrays have equal lengths; their contents are not looked at."""
    token_ids, parents = message.token_ids, message.parents
    if len(token_ids) != len(parents):
        raise ProtocolError(
            f"tree has {len(token_ids)} bytes of token_ids and {len(parents)} of parents; "
            "one of each per node"
        )
    if not token_ids:
        return EMPTY_TREE
    return TokenTree(
        unpack_tokens(token_ids, "tree.token_ids"), unpack_tokens(parents, "tree.parents")
    )


def encode_params(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias_token_ids=pack_ids([token_id for token_id, _ in params.logit_bias]),
        logit_bias_values=[bias for _, bias in params.logit_bias],
        seed=params.seed & _MASK64,
        stream=params.stream,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=pack_ids(params.stop_token_ids),
        logprobs=params.logprobs,
    )


def decode_params(message: pb.SamplingParams) -> SamplingParams:
    bias_ids = unpack_tokens(message.logit_bias_token_ids, "params.logit_bias_token_ids").tolist()
    bias_values = message.logit_bias_values
    if len(bias_ids) != len(bias_values):
        raise ProtocolError(
            f"params has {len(bias_ids)} logit_bias_token_ids and {len(bias_values)} "
            "logit_bias_values; one value per id"
        )
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple(zip(bias_ids, bias_values, strict=True)),
        seed=message.seed,
        stream=message.stream,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(
            unpack_tokens(message.stop_token_ids, "params.stop_token_ids").tolist()
        ),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def encode_speculation(options: SpeculationOptions) -> pb.SpeculationOptions:
    names = None if options.drafters is None else pb.DrafterNames(names=options.drafters)
    return pb.SpeculationOptions(
        enabled=options.enabled,
        max_draft_tokens=options.max_draft_tokens,
        drafters=names,
        latency_class=options.latency_class,
    )


def decode_speculation(message: pb.SpeculationOptions) -> SpeculationOptions:
    has = message.HasField
    return SpeculationOptions(
        enabled=message.enabled,
        max_draft_tokens=message.max_draft_tokens if has("max_draft_tokens") else None,
        drafters=tuple(message.drafters.names) if has("drafters") else None,
        latency_class=message.latency_class if has("latency_class") else None,
    )


def encode_logprobs(logprobs: Sequence[TokenLogprob]) -> pb.Logprobs | None:
    """None when there are none: the field then stays absent.  Rounds to single precision."""
    if not logprobs:
        return None
    top = [alternative for entry in logprobs for alternative in entry.top]
    return pb.Logprobs(
        logprobs=np.array([entry.logprob for entry in logprobs], dtype=_FLOAT32).tobytes(),
        num_top=pack_ids([len(entry.top) for entry in logprobs]),
        top_token_ids=pack_ids([token_id for token_id, _ in top]),
        top_logprobs=np.array([logprob for _, logprob in top], dtype=_FLOAT32).tobytes(),
    )


def decode_logprobs(message: pb.Logprobs) -> tuple[TokenLogprob, ...]:
    logprobs = unpack_floats(message.logprobs, "logprobs.logprobs").tolist()
    counts = unpack_tokens(message.num_top, "logprobs.num_top").tolist()
    top_ids = unpack_tokens(message.top_token_ids, "logprobs.top_token_ids").tolist()
    top_logprobs = unpack_floats(message.top_logprobs, "logprobs.top_logprobs").tolist()
    if len(counts) != len(logprobs) or any(count < 0 for count in counts):
        raise ProtocolError(f"logprobs has {len(logprobs)} tokens and {len(counts)} counts")
    if not sum(counts) == len(top_ids) == len(top_logprobs):
        raise ProtocolError(
            f"logprobs counts {sum(counts)} alternatives but carries {len(top_ids)} ids and "
            f"{len(top_logprobs)} values"
        )
    alternatives = iter(zip(top_ids, top_logprobs, strict=True))
    return tuple(
        TokenLogprob(logprob, tuple(next(alternatives) for _ in range(count)))
        for logprob, count in zip(logprobs, counts, strict=True)
    )


def encode_refusal(refusal: Refusal) -> pb.Refusal:
    return pb.Refusal(
        request_id=refusal.request_id,
        generation=refusal.generation,
        code=refusal.code,
        message=refusal.message,
    )


def decode_refusal(message: pb.Refusal) -> Refusal:
    return Refusal(message.request_id, message.generation, message.code, message.message)


def refusal_of(request_id: str, generation: int, error: ProtocolError) -> Refusal:
    """The refusal of an item that could not be decoded."""
    return Refusal(request_id, generation, error.code, error.message)


def encode_finish(reason: FinishReason | None) -> pb.FinishReason:
    return _FINISH_TO_WIRE[reason]


def decode_finish(value: int) -> FinishReason | None:
    """Raises ProtocolError for a reason this version does not know."""
    try:
        return _FINISH_FROM_WIRE[value]
    except KeyError:
        raise ProtocolError(f"finish_reason is {value}, which this version does not know") from None


def encode_stats(stats: SpeculationStats) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        num_steps=stats.num_steps,
        num_spec_steps=stats.num_spec_steps,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
        num_spec_tokens=stats.num_spec_tokens,
        acceptance_histogram=stats.acceptance_histogram,
    )


def decode_stats(message: pb.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        num_steps=message.num_steps,
        num_spec_steps=message.num_spec_steps,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_draft_tokens=message.num_accepted_draft_tokens,
        num_spec_tokens=message.num_spec_tokens,
        acceptance_histogram=tuple(message.acceptance_histogram),
    )


def encode_description(description: WorkerDescription) -> pb.WorkerDescription:
    return pb.WorkerDescription(
        worker_id=description.worker_id,
        role=description.role,
        name=description.name,
        protocol_version=description.protocol_version,
        model_hash=description.model_hash,
        tokenizer_hash=description.tokenizer_hash,
        vocab_size=description.vocab_size,
        max_context_len=description.max_context_len,
        max_running_sequences=description.max_running_sequences,
        max_batch_tokens=description.max_batch_tokens,
        devices=description.devices,
        step_rows=description.step_rows,
        step_times_s=description.step_times_s,
    )


def decode_description(message: pb.WorkerDescription) -> WorkerDescription:
    return WorkerDescription(
        worker_id=message.worker_id,
        role=message.role,
        name=message.name,
        protocol_version=message.protocol_version,
        model_hash=message.model_hash,
        tokenizer_hash=message.tokenizer_hash,
        vocab_size=message.vocab_size,
        max_context_len=message.max_context_len,
        max_running_sequences=message.max_running_sequences,
        max_batch_tokens=message.max_batch_tokens,
        devices=tuple(message.devices),
        step_rows=tuple(message.step_rows),
        step_times_s=tuple(message.step_times_s),
    )
