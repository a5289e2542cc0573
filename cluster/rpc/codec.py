"""The codecs of what several messages hold.

Decoding raises ProtocolError for what cannot be a noun at all (lengths that do not fit).  Whoever
takes a noun in checks what it says: trees by `spec.tree_check`, verdicts by the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.client.generated import common_pb2 as pb
from cluster.core import FinishReason, SamplingParams, TokenLogprob, TokenTree
from cluster.errors import ProtocolError
from cluster.requests.fields import BeamEnd, BeamSpec, DraftStep, EarlyStopping, Law
from cluster.rpc.codec_records import ByHand, Codec, enum_codec, record_codec
from cluster.rpc.messages import WorkerDescription
from cluster.spec.tree_check import ANY_VOCABULARY, check_tree


def _encode_logprobs(logprobs: Sequence[TokenLogprob]) -> pb.Logprobs | None:
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


def _decode_logprobs(message: pb.Logprobs) -> tuple[TokenLogprob, ...]:
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


def _encode_bias(params: SamplingParams) -> dict[str, Any]:
    return {
        "logit_bias_token_ids": [token_id for token_id, _ in params.logit_bias],
        "logit_bias_values": [bias for _, bias in params.logit_bias],
    }


def _decode_bias(message: pb.SamplingParams) -> tuple[tuple[int, float], ...]:
    ids, values = message.logit_bias_token_ids, message.logit_bias_values
    if len(ids) != len(values):
        raise ProtocolError(
            f"params has {len(ids)} logit_bias_token_ids and {len(values)} "
            "logit_bias_values; one value per id"
        )
    return tuple(zip(ids, values, strict=True))


def _decode_step(message: pb.DraftStep) -> DraftStep:
    step = _STEP.decode(message)
    check_tree(TokenTree(step.token_ids, step.parents), ANY_VOCABULARY)
    size = step.num_nodes
    if not len(step.survival) == len(step.sources) == size or not np.isfinite(step.survival).all():
        raise ProtocolError(f"a step has {size} nodes and other survivals or sources")
    if len(step.path) and not 0 <= step.path.min() <= step.path.max() < size:
        raise ProtocolError(f"a step's path leaves its {size} nodes")
    return step


EARLY_STOPPING: Codec[EarlyStopping] = enum_codec(
    EarlyStopping,
    pb.EarlyStopping,
    "early_stopping",
    {
        False: pb.EARLY_STOPPING_UNSPECIFIED,
        True: pb.EARLY_STOPPING_ALWAYS,
        "never": pb.EARLY_STOPPING_NEVER,
    },
)
LAW: Codec[Law] = enum_codec(
    Law,
    pb.AcceptanceLaw,
    "law",
    {
        "coupled": pb.ACCEPTANCE_LAW_UNSPECIFIED,
        "rejection": pb.ACCEPTANCE_LAW_REJECTION,
        "multi_step": pb.ACCEPTANCE_LAW_MULTI_STEP,
    },
)
FINISH: Codec[FinishReason | None] = enum_codec(
    FinishReason | None,
    pb.FinishReason,
    "finish_reason",
    {
        None: pb.FINISH_REASON_UNSPECIFIED,
        **{each: pb.FinishReason.Value(f"FINISH_REASON_{each.name}") for each in FinishReason},
    },
)
LOGPROBS: Codec[tuple[TokenLogprob, ...]] = Codec(
    tuple[TokenLogprob, ...], pb.Logprobs.DESCRIPTOR.full_name, _encode_logprobs, _decode_logprobs
)
# Of an optional field: absent = every drafter of the task may help, empty = none may.
_DRAFTERS: Codec[tuple[str, ...]] = Codec(
    tuple[str, ...],
    pb.DrafterNames.DESCRIPTOR.full_name,
    lambda names: pb.DrafterNames(names=names),
    lambda message: tuple(message.names),
)
BEAM_SPEC = record_codec(BeamSpec, pb.BeamSearch, [EARLY_STOPPING])
PARAMS = record_codec(
    SamplingParams,
    pb.SamplingParams,
    [BEAM_SPEC, LAW],
    names={"beams": "beam_search"},
    by_hand={
        "logit_bias": ByHand(
            ("logit_bias_token_ids", "logit_bias_values"), _encode_bias, _decode_bias
        ),
        "seed": ByHand(
            ("seed",), lambda params: {"seed": params.noise_key}, lambda message: message.seed
        ),
    },
)
_STEP = record_codec(DraftStep, pb.DraftStep)
DESCRIPTION = record_codec(WorkerDescription, pb.DescribeResponse)
# Of what several records hold.
PARTS: Sequence[Codec[Any]] = (
    FINISH,
    LOGPROBS,
    _DRAFTERS,
    LAW,
    PARAMS,
    BEAM_SPEC,
    _STEP.read_by(_decode_step),
    record_codec(BeamEnd, pb.BeamEnd, names={"is_stopped": "stopped"}),
)
