"""The frames between coordinators and targets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_FLOATS, FloatArray
from cluster.errors import ProtocolError
from cluster.messages import (
    AdapterList,
    Heartbeat,
    Open,
    PlainWhy,
    PoolTree,
    Refusal,
    Sample,
    StepFrame,
    StepReport,
    TextName,
    TextVerdict,
    VerdictFrame,
)
from cluster.rpc.codec import (
    decode_finish,
    decode_logprobs,
    decode_params,
    decode_refusal,
    encode_finish,
    encode_logprobs,
    encode_params,
    encode_refusal,
    make_tree,
    pack_tokens,
    refusal_of,
    unpack_tokens,
)
from cluster.rpc.codec_beams import decode_beam_ends, encode_beam_ends
from cluster.rpc.frames import Decoded, FrameCodec
from cluster.rpc.generated import target_pb2 as pb
from cluster.spec.tree_check import ANY_VOCABULARY, problem_of_tree

_FLOAT32 = np.dtype("<f4")
_UINT32 = np.dtype("<u4")
_NO_BITS: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
_NO_BITS.setflags(write=False)
_REPORT_FIELDS = tuple(StepReport.__dataclass_fields__)


def _pack_bits(bits: npt.NDArray[np.uint32]) -> bytes:
    return bits.astype(_UINT32, copy=False).tobytes()


def _unpack_bits(data: bytes, field: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(_whole(data, field), dtype=_UINT32) if data else _NO_BITS


def _unpack_floats(data: bytes, field: str) -> FloatArray:
    return np.frombuffer(_whole(data, field), dtype=_FLOAT32) if data else EMPTY_FLOATS


def _whole(data: bytes, field: str) -> bytes:
    if len(data) % 4:
        raise ProtocolError(f"{field} has {len(data)} bytes; it takes a multiple of 4")
    return data


def _encode_open(opened: Open) -> pb.Open:
    return pb.Open(
        request_id=opened.request_id,
        generation=opened.generation,
        token_ids=pack_tokens(opened.token_ids),
        prefix_hash=opened.prefix_hash,
        prompt_len=opened.prompt_len,
        params=encode_params(opened.params),
        max_len=opened.max_len,
        task=opened.task,
        tenant=opened.tenant,
        adapter=opened.adapter,
        drafters=opened.drafters,
        max_draft_tokens=opened.max_draft_tokens,
        weight=opened.weight,
    )


def _decode_open(message: pb.Open) -> Open:
    token_ids = unpack_tokens(message.token_ids, "token_ids")
    if not len(token_ids):
        raise ProtocolError("token_ids is empty; send the whole text")
    if not message.HasField("params"):
        raise ProtocolError("params is absent; a text is drawn by them")
    return Open(
        request_id=message.request_id,
        generation=message.generation,
        token_ids=token_ids,
        prefix_hash=message.prefix_hash,
        prompt_len=message.prompt_len,
        params=decode_params(message.params),
        max_len=message.max_len,
        task=message.task,
        tenant=message.tenant,
        adapter=message.adapter,
        drafters=tuple(message.drafters),
        max_draft_tokens=message.max_draft_tokens,
        weight=message.weight,
    )


def _encode_name(name: TextName) -> pb.TextName:
    return pb.TextName(request_id=name.request_id, generation=name.generation)


def _decode_name(message: pb.TextName) -> TextName:
    return TextName(message.request_id, message.generation)


def _encode_tree(tree: PoolTree) -> pb.PoolTree:
    return pb.PoolTree(
        request_id=tree.request_id,
        generation=tree.generation,
        base_len=tree.base_len,
        prefix_hash=tree.prefix_hash,
        token_ids=pack_tokens(tree.tree.token_ids),
        parents=pack_tokens(tree.tree.parents),
        survival=tree.survival.astype(_FLOAT32, copy=False).tobytes(),
        sources=_pack_bits(tree.sources),
        weights=tree.weights,
    )


def _decode_tree(message: pb.PoolTree) -> PoolTree | None:
    """None for one that is no tree: it would only have been a guess."""
    try:
        tree = make_tree(
            unpack_tokens(message.token_ids, "token_ids"),
            unpack_tokens(message.parents, "parents"),
        )
        survival = _unpack_floats(message.survival, "survival")
        sources = _unpack_bits(message.sources, "sources")
    except ProtocolError:
        return None
    is_sound = len(sources) == len(tree) and not problem_of_tree(tree, survival, ANY_VOCABULARY)
    if not is_sound:
        return None
    return PoolTree(
        message.request_id, message.generation, message.base_len, message.prefix_hash, tree,
        survival, sources, tuple(message.weights),
    )  # fmt: skip


def _encode_beat(beat: Heartbeat | None) -> pb.Heartbeat | None:
    if beat is None:
        return None
    return pb.Heartbeat(texts=map(_encode_name, beat.texts), heard=beat.heard, seats=beat.seats)


def _decode_beat(message: pb.Heartbeat) -> Heartbeat:
    return Heartbeat(tuple(map(_decode_name, message.texts)), message.heard, message.seats)


def _encode_steps(frame: StepFrame) -> pb.StepFrame:
    return pb.StepFrame(
        opens=map(_encode_open, frame.opens),
        cancels=map(_encode_name, frame.cancels),
        trees=map(_encode_tree, frame.trees),
        serial=frame.serial,
        acknowledged=frame.acknowledged,
        heartbeat=_encode_beat(frame.heartbeat),
    )


def _decode_steps(message: pb.StepFrame) -> Decoded[StepFrame]:
    opens: list[Open] = []
    refusals: list[Refusal] = []
    for each in message.opens:
        try:
            opens.append(_decode_open(each))
        except ProtocolError as error:
            refusals.append(refusal_of(each.request_id, each.generation, error))
    trees = [tree for tree in map(_decode_tree, message.trees) if tree is not None]
    frame = StepFrame(
        tuple(opens), tuple(map(_decode_name, message.cancels)), tuple(trees), message.serial,
        message.acknowledged,
        _decode_beat(message.heartbeat) if message.HasField("heartbeat") else None,
    )  # fmt: skip
    return Decoded(frame, tuple(refusals))


def _encode_verdict(verdict: TextVerdict) -> pb.TextVerdict:
    return pb.TextVerdict(
        request_id=verdict.request_id,
        generation=verdict.generation,
        context_len=verdict.context_len,
        token_ids=pack_tokens(verdict.token_ids),
        sources=_pack_bits(verdict.sources),
        num_nodes=verdict.num_nodes,
        owners=verdict.owners,
        verified=verdict.verified,
        credited=verdict.credited,
        why=verdict.why.value,  # type: ignore[arg-type]  # the enums' values are equal
        finish_reason=encode_finish(verdict.finish_reason),
        logprobs=encode_logprobs(verdict.logprobs),
        num_cached=verdict.num_cached,
        beams=encode_beam_ends(verdict.beams),
    )


def _decode_verdict(message: pb.TextVerdict) -> TextVerdict:
    token_ids = unpack_tokens(message.token_ids, "token_ids")
    logprobs = decode_logprobs(message.logprobs) if message.HasField("logprobs") else ()
    if logprobs and len(logprobs) != len(token_ids):
        raise ProtocolError(f"verdict has {len(token_ids)} tokens and {len(logprobs)} logprobs")
    try:
        why = PlainWhy(message.why)
    except ValueError:
        raise ProtocolError(f"why is {message.why}, which this version does not know") from None
    return TextVerdict(
        request_id=message.request_id,
        generation=message.generation,
        context_len=message.context_len,
        token_ids=token_ids,
        sources=_unpack_bits(message.sources, "sources"),
        owners=tuple(message.owners),
        num_nodes=message.num_nodes,
        verified=tuple(message.verified),
        credited=tuple(message.credited),
        why=why,
        finish_reason=decode_finish(message.finish_reason),
        logprobs=logprobs,
        num_cached=message.num_cached,
        beams=decode_beam_ends(message.beams, token_ids),
    )


def _encode_report(report: StepReport | None) -> pb.StepReport | None:
    if report is None:
        return None
    return pb.StepReport(**{name: getattr(report, name) for name in _REPORT_FIELDS})


def _decode_report(message: pb.StepReport) -> StepReport:
    return StepReport(**{name: getattr(message, name) for name in _REPORT_FIELDS})


def _encode_sample(sample: Sample) -> pb.Sample:
    return pb.Sample(
        metric=sample.metric, labels=sample.labels, value=sample.value,
        is_gauge=sample.how == "set",
    )  # fmt: skip


def _decode_sample(message: pb.Sample) -> Sample:
    how = "set" if message.is_gauge else "add"
    return Sample(message.metric, how, tuple(message.labels), message.value)  # type: ignore[arg-type]


def encode_adapters(adapters: AdapterList | None) -> pb.AdapterList | None:
    if adapters is None:
        return None
    return pb.AdapterList(served=adapters.served, refused=adapters.refused)


def decode_adapters(message: pb.AdapterList) -> AdapterList:
    return AdapterList(tuple(message.served), message.refused)


def _encode_verdicts(frame: VerdictFrame) -> pb.VerdictFrame:
    return pb.VerdictFrame(
        verdicts=map(_encode_verdict, frame.verdicts),
        refusals=map(encode_refusal, frame.refusals),
        report=_encode_report(frame.report),
        serial=frame.serial,
        acknowledged=frame.acknowledged,
        heartbeat=_encode_beat(frame.heartbeat),
        adapters=encode_adapters(frame.adapters),
        samples=map(_encode_sample, frame.samples),
        status=frame.status,
    )


def _decode_verdicts(message: pb.VerdictFrame) -> Decoded[VerdictFrame]:
    verdicts: list[TextVerdict] = []
    refusals = [decode_refusal(refusal) for refusal in message.refusals]
    for verdict in message.verdicts:
        try:
            verdicts.append(_decode_verdict(verdict))
        except ProtocolError as error:
            # To the coordinator, an unreadable verdict is a refusal of its text.
            refusals.append(refusal_of(verdict.request_id, verdict.generation, error))
    frame = VerdictFrame(
        tuple(verdicts),
        tuple(refusals),
        _decode_report(message.report) if message.HasField("report") else None,
        message.serial,
        message.acknowledged,
        _decode_beat(message.heartbeat) if message.HasField("heartbeat") else None,
        decode_adapters(message.adapters) if message.HasField("adapters") else None,
        tuple(map(_decode_sample, message.samples)),
        message.status,
    )
    return Decoded(frame)


STEPS = FrameCodec("StepFrame", _encode_steps, _decode_steps, pb.StepFrame.FromString)
VERDICT = FrameCodec("VerdictFrame", _encode_verdicts, _decode_verdicts, pb.VerdictFrame.FromString)
