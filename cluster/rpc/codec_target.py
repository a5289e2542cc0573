"""The frames between coordinator and target."""

from __future__ import annotations

from cluster.core import Verdict, VerifyItem
from cluster.errors import ProtocolError
from cluster.messages import (
    AdapterList,
    CacheMiss,
    DraftReport,
    InHand,
    Refusal,
    StepReport,
    VerdictFrame,
    VerifyFrame,
)
from cluster.rpc.codec import (
    decode_logprobs,
    decode_params,
    decode_refusal,
    encode_logprobs,
    encode_params,
    encode_refusal,
    make_tree,
    pack_tokens,
    refusal_of,
    unpack_tokens,
)
from cluster.rpc.codec_beams import decode_beam_ends, encode_beam_ends
from cluster.rpc.codec_draft import PROPOSAL
from cluster.rpc.frames import Decoded, FrameCodec
from cluster.rpc.generated import target_pb2 as pb
from cluster.spec.tree_check import ANY_VOCABULARY, are_sound, problem_of_tree


def _encode_item(item: VerifyItem) -> pb.VerifyItem:
    return pb.VerifyItem(
        request_id=item.request_id,
        generation=item.generation,
        base_len=item.base_len,
        prefix_hash=item.prefix_hash,
        delta=pack_tokens(item.delta),
        tree_token_ids=pack_tokens(item.tree.token_ids),
        tree_parents=pack_tokens(item.tree.parents),
        prompt_len=item.prompt_len,
        params=None if item.params is None else encode_params(item.params),
        tenant=item.tenant,
        draft_nodes=item.draft_nodes,
        task=item.task,
        residents=item.residents,
        adapter=item.adapter,
        only_look_ups=item.only_look_ups,
    )


def _decode_item(message: pb.VerifyItem) -> VerifyItem:
    delta = unpack_tokens(message.delta, "delta")
    if not len(delta):
        raise ProtocolError("delta is empty; send at least the last committed token")
    return VerifyItem(
        request_id=message.request_id,
        generation=message.generation,
        base_len=message.base_len,
        prefix_hash=message.prefix_hash,
        delta=delta,
        tree=make_tree(
            unpack_tokens(message.tree_token_ids, "tree_token_ids"),
            unpack_tokens(message.tree_parents, "tree_parents"),
        ),
        prompt_len=message.prompt_len,
        params=decode_params(message.params) if message.HasField("params") else None,
        tenant=message.tenant,
        draft_nodes=message.draft_nodes,
        task=message.task,
        residents=tuple(message.residents),
        adapter=message.adapter,
        only_look_ups=message.only_look_ups,
    )


def _encode_verify(frame: VerifyFrame) -> pb.VerifyFrame:
    return pb.VerifyFrame(
        items=map(_encode_item, frame.items), released=frame.released, apart=frame.is_apart
    )


def _decode_verify(message: pb.VerifyFrame) -> Decoded[VerifyFrame]:
    items: list[VerifyItem] = []
    refusals: list[Refusal] = []
    for item in message.items:
        try:
            items.append(_decode_item(item))
        except ProtocolError as error:
            refusals.append(refusal_of(item.request_id, item.generation, error))
    if not are_sound([item.tree for item in items], None, ANY_VOCABULARY):
        problems = [problem_of_tree(item.tree, None, ANY_VOCABULARY) for item in items]
        refusals += [
            refusal_of(item.request_id, item.generation, ProtocolError(problem))
            for item, problem in zip(items, problems, strict=True)
            if problem is not None
        ]
        items = [item for item, problem in zip(items, problems, strict=True) if problem is None]
    frame = VerifyFrame(tuple(items), tuple(message.released), message.apart)
    return Decoded(frame, tuple(refusals))


def _encode_verdict(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(
        request_id=verdict.request_id,
        generation=verdict.generation,
        context_len=verdict.context_len,
        path=pack_tokens(verdict.path),
        token_ids=pack_tokens(verdict.token_ids),
        logprobs=encode_logprobs(verdict.logprobs),
        num_cached=verdict.num_cached,
        beams=encode_beam_ends(verdict.beams),
    )


def _decode_verdict(message: pb.Verdict) -> Verdict:
    path = unpack_tokens(message.path, "path")
    token_ids = unpack_tokens(message.token_ids, "token_ids")
    beams = decode_beam_ends(message.beams, token_ids)
    if not beams and len(token_ids) != len(path) + 1:
        raise ProtocolError(
            f"verdict has {len(path)} accepted nodes and {len(token_ids)} tokens; "
            "one more token than nodes is expected"
        )
    logprobs = decode_logprobs(message.logprobs) if message.HasField("logprobs") else ()
    if logprobs and len(logprobs) != len(token_ids):
        raise ProtocolError(f"verdict has {len(token_ids)} tokens and {len(logprobs)} logprobs")
    return Verdict(
        request_id=message.request_id,
        generation=message.generation,
        context_len=message.context_len,
        path=path,
        token_ids=token_ids,
        logprobs=logprobs,
        num_cached=message.num_cached,
        beams=beams,
    )


def _encode_miss(miss: CacheMiss) -> pb.CacheMiss:
    return pb.CacheMiss(
        request_id=miss.request_id, generation=miss.generation, have_len=miss.have_len
    )


def _encode_in_hand(named: InHand) -> pb.InHand:
    return pb.InHand(request_id=named.request_id, generation=named.generation)


def _encode_report(report: StepReport) -> pb.StepReport:
    return pb.StepReport(
        step_time_s=report.step_time_s,
        forward_time_s=report.forward_time_s,
        queue_time_s=report.queue_time_s,
        num_sequences=report.num_sequences,
        num_nodes=report.num_nodes,
        num_prefill_tokens=report.num_prefill_tokens,
        pages_in_use=report.pages_in_use,
        pages_total=report.pages_total,
    )


def _decode_report(message: pb.StepReport) -> StepReport:
    return StepReport(
        step_time_s=message.step_time_s,
        forward_time_s=message.forward_time_s,
        queue_time_s=message.queue_time_s,
        num_sequences=message.num_sequences,
        num_nodes=message.num_nodes,
        num_prefill_tokens=message.num_prefill_tokens,
        pages_in_use=message.pages_in_use,
        pages_total=message.pages_total,
    )


def _encode_drafts(report: DraftReport) -> pb.DraftReport:
    return pb.DraftReport(
        frames=(
            pb.ResidentFrame(drafter=name, frame=PROPOSAL.to_message(frame))
            for name, frame in report.frames
        ),
        draft_time_s=report.draft_time_s,
        num_sequences=report.num_sequences,
        num_nodes=report.num_nodes,
        stalled=report.stalled,
        num_read=report.num_read,
    )


def _decode_drafts(message: pb.DraftReport) -> DraftReport:
    return DraftReport(
        frames=tuple(
            (each.drafter, PROPOSAL.from_message(each.frame).frame) for each in message.frames
        ),
        draft_time_s=message.draft_time_s,
        num_sequences=message.num_sequences,
        num_nodes=message.num_nodes,
        stalled=tuple(message.stalled),
        num_read=message.num_read,
    )


def encode_adapters(adapters: AdapterList | None) -> pb.AdapterList | None:
    if adapters is None:
        return None
    return pb.AdapterList(served=adapters.served, refused=adapters.refused)


def decode_adapters(message: pb.AdapterList) -> AdapterList:
    return AdapterList(tuple(message.served), message.refused)


def _encode_verdicts(frame: VerdictFrame) -> pb.VerdictFrame:
    return pb.VerdictFrame(
        verdicts=map(_encode_verdict, frame.verdicts),
        misses=map(_encode_miss, frame.misses),
        refusals=map(encode_refusal, frame.refusals),
        report=None if frame.report is None else _encode_report(frame.report),
        in_hand=map(_encode_in_hand, frame.in_hand),
        drafts=None if frame.drafts is None else _encode_drafts(frame.drafts),
        adapters=encode_adapters(frame.adapters),
    )


def _decode_verdicts(message: pb.VerdictFrame) -> Decoded[VerdictFrame]:
    verdicts: list[Verdict] = []
    refusals = [decode_refusal(refusal) for refusal in message.refusals]
    for verdict in message.verdicts:
        try:
            verdicts.append(_decode_verdict(verdict))
        except ProtocolError as error:
            # The coordinator asked: to it, an unreadable answer is a refusal of its item.
            refusals.append(refusal_of(verdict.request_id, verdict.generation, error))
    misses = tuple(
        CacheMiss(miss.request_id, miss.generation, miss.have_len) for miss in message.misses
    )
    report = _decode_report(message.report) if message.HasField("report") else None
    in_hand = tuple(InHand(each.request_id, each.generation) for each in message.in_hand)
    drafts = _decode_drafts(message.drafts) if message.HasField("drafts") else None
    adapters = decode_adapters(message.adapters) if message.HasField("adapters") else None
    frame = VerdictFrame(
        tuple(verdicts), misses, tuple(refusals), report, in_hand, drafts, adapters
    )  # fmt: skip
    return Decoded(frame)


VERIFY = FrameCodec("VerifyFrame", _encode_verify, _decode_verify, pb.VerifyFrame.FromString)
VERDICT = FrameCodec("VerdictFrame", _encode_verdicts, _decode_verdicts, pb.VerdictFrame.FromString)
