"""Core nouns to protobuf and back: the pieces that several frames share.

Public messages carry arrays as packed repeated fields, which are copied into numpy arrays; those
between our own processes as little-endian `bytes`, which are read in place, so such arrays are
read-only.  Decoding raises ProtocolError for what cannot be a noun at all (lengths that do not
fit), and the frames' decoders for trees that `spec.tree_check` refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cluster.client.generated import common_pb2 as pb
from cluster.core import (
    EMPTY_FLOATS,
    EMPTY_TOKENS,
    EMPTY_TREE,
    FinishReason,
    FloatArray,
    SamplingParams,
    TokenArray,
    TokenLogprob,
    TokenTree,
)
from cluster.errors import ProtocolError
from cluster.messages import Refusal, WorkerDescription
from cluster.models.made_for import MadeFor
from cluster.requests.grammar_spec import GrammarSpec
from cluster.rpc.codec_beams import decode_beam_spec, encode_beam_spec
from cluster.rpc.codec_engine import decode_engine, encode_engine

_INT32 = np.dtype("<i4")
# Protobuf hands a repeated field to numpy in one piece, at a fixed price; shorter ones are read
# sooner element by element.  Trees and deltas are mostly this short.
_FEW = 32

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


def unpack_tokens(data: bytes, field: str) -> TokenArray:
    """i32[] as a read-only view; field names it in the ProtocolError."""
    if not data:
        return EMPTY_TOKENS
    if len(data) % 4:
        raise ProtocolError(f"{field} has {len(data)} bytes; i32[] takes a multiple of 4")
    return np.frombuffer(data, dtype=_INT32)


def read_tokens(field: Sequence[int]) -> TokenArray:
    """A repeated sfixed32 field as int32[n], a copy."""
    if not field:
        return EMPTY_TOKENS
    return np.array(field[:] if len(field) < _FEW else field, dtype=np.int32)


def read_floats(field: Sequence[float]) -> FloatArray:
    """A repeated float field as float32[n], a copy."""
    if not field:
        return EMPTY_FLOATS
    return np.array(field[:] if len(field) < _FEW else field, dtype=np.float32)


def make_tree(token_ids: TokenArray, parents: TokenArray) -> TokenTree:
    """The tree as it was sent: `spec.tree_check` is to look at it next."""
    return TokenTree(token_ids, parents) if len(token_ids) or len(parents) else EMPTY_TREE


def encode_params(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias_token_ids=[token_id for token_id, _ in params.logit_bias],
        logit_bias_values=[bias for _, bias in params.logit_bias],
        seed=params.noise_key,
        stream=params.stream,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        logprobs=params.logprobs,
        prediction=params.prediction,
        forced_ids=params.forced_ids,
        grammar=None if params.grammar is None else encode_grammar(params.grammar),
        beam_search=encode_beam_spec(params.beams),
    )


def encode_grammar(grammar: GrammarSpec) -> pb.Grammar:
    return pb.Grammar(
        kind=grammar.kind,
        source=grammar.source,
        reasoning_start=grammar.reasoning_start,
        reasoning_end=grammar.reasoning_end,
    )


def decode_grammar(message: pb.Grammar) -> GrammarSpec:
    return GrammarSpec(
        message.kind,
        message.source,
        tuple(message.reasoning_start),
        tuple(message.reasoning_end),
    )


def decode_params(message: pb.SamplingParams) -> SamplingParams:
    bias_ids, bias_values = message.logit_bias_token_ids, message.logit_bias_values
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
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prediction=tuple(message.prediction),
        forced_ids=tuple(message.forced_ids),
        grammar=decode_grammar(message.grammar) if message.HasField("grammar") else None,
        beams=decode_beam_spec(message.beam_search) if message.HasField("beam_search") else None,
    )


def drafter_names(names: Sequence[str] | None) -> pb.DrafterNames | None:
    """None where every drafter of the task may help; an empty list where none may."""
    return None if names is None else pb.DrafterNames(names=names)


def encode_draft_sources(sources: Sequence[Sequence[str]]) -> list[pb.DrafterNames]:
    return [pb.DrafterNames(names=names) for names in sources]


def decode_draft_sources(messages: Iterable[pb.DrafterNames]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(message.names) for message in messages)


def encode_logprobs(logprobs: Sequence[TokenLogprob]) -> pb.Logprobs | None:
    """None when there are none: the field then stays absent.  Rounds to single precision."""
    if not logprobs:
        return None
    top = [alternative for entry in logprobs for alternative in entry.top]
    return pb.Logprobs(
        logprobs=[entry.logprob for entry in logprobs],
        num_top=[len(entry.top) for entry in logprobs],
        top_token_ids=[token_id for token_id, _ in top],
        top_logprobs=[logprob for _, logprob in top],
        ranks=[entry.rank for entry in logprobs],
    )


def decode_logprobs(message: pb.Logprobs) -> tuple[TokenLogprob, ...]:
    logprobs, counts = message.logprobs, message.num_top
    top_ids, top_logprobs = message.top_token_ids, message.top_logprobs
    if len(counts) != len(logprobs):
        raise ProtocolError(f"logprobs has {len(logprobs)} tokens and {len(counts)} counts")
    if not sum(counts) == len(top_ids) == len(top_logprobs):
        raise ProtocolError(
            f"logprobs counts {sum(counts)} alternatives but carries {len(top_ids)} ids and "
            f"{len(top_logprobs)} values"
        )
    ranks = message.ranks or [0] * len(logprobs)
    if len(ranks) != len(logprobs):
        raise ProtocolError(f"logprobs has {len(logprobs)} tokens and {len(ranks)} ranks")
    alternatives = iter(zip(top_ids, top_logprobs, strict=True))
    return tuple(
        TokenLogprob(logprob, tuple(next(alternatives) for _ in range(count)), rank)
        for logprob, count, rank in zip(logprobs, counts, ranks, strict=True)
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


def encode_description(description: WorkerDescription) -> pb.DescribeResponse:
    return pb.DescribeResponse(
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
        native_build=description.native_build,
        is_reproducible=description.is_reproducible,
        residents=description.residents,
        look_ups=description.look_ups,
        refused=description.refused,
        made_for={
            name: pb.MadeFor(name=each.name, model_hash=each.model_hash)
            for name, each in description.made_for.items()
        },
        engines=map(encode_engine, description.engines),
    )


def decode_description(message: pb.DescribeResponse) -> WorkerDescription:
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
        native_build=message.native_build,
        is_reproducible=message.is_reproducible,
        residents=tuple(message.residents),
        look_ups=tuple(message.look_ups),
        refused=dict(message.refused),
        made_for={
            name: MadeFor(each.name, each.model_hash) for name, each in message.made_for.items()
        },
        engines=tuple(map(decode_engine, message.engines)),
    )
