"""Frames survive encoding and decoding, and a malformed item does not affect the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.client.generated import common_pb2
from cluster.core import (
    FinishReason,
    Proposal,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    TokenTree,
    token_array,
)
from cluster.errors import ProtocolError
from cluster.made_for import MadeFor
from cluster.messages import (
    EventFrame,
    ProposalFrame,
    Refusal,
    VerifyFrame,
    WorkerDescription,
)
from cluster.rpc import codec
from cluster.rpc.codec_coordinator import EVENT, SUBMIT
from cluster.rpc.codec_draft import COMMIT, PROPOSAL
from cluster.rpc.codec_target import VERDICT, VERIFY
from cluster.rpc.conversations import ANSWER_AS_COORDINATOR, ANSWER_AS_DRAFTER, ANSWER_AS_TARGET
from cluster.rpc.frames import FrameCodec
from cluster.rpc.generated import coordinator_pb2, draft_pb2, target_pb2
from tests.support.rpc import frames_strategy as frames
from tests.support.rpc.frames_strategy import same, verify_item

ROUND_TRIPS = [
    pytest.param(VERIFY, frames.verify_frames, id="verify"),
    pytest.param(VERDICT, frames.verdict_frames, id="verdict"),
    pytest.param(COMMIT, frames.commit_frames, id="commit"),
    pytest.param(PROPOSAL, frames.proposal_frames, id="proposal"),
    pytest.param(SUBMIT, frames.submit_frames, id="submit"),
    pytest.param(EVENT, frames.event_frames, id="event"),
]


@pytest.mark.parametrize(("frame_codec", "strategy"), ROUND_TRIPS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_frame_survives_the_wire(
    frame_codec: FrameCodec[Any], strategy: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    frame = data.draw(strategy)
    (encoded,) = frame_codec.encode(frame)
    decoded = frame_codec.decode(encoded)
    assert decoded.refusals == ()
    assert same(decoded.frame, frame)


@settings(max_examples=30, deadline=None)
@given(
    description=st.builds(
        WorkerDescription,
        worker_id=frames.ids,
        role=frames.ids,
        name=frames.ids,
        protocol_version=st.integers(0, 100),
        model_hash=frames.ids,
        tokenizer_hash=frames.ids,
        vocab_size=frames.lengths,
        max_context_len=frames.lengths,
        max_running_sequences=frames.lengths,
        max_batch_tokens=frames.lengths,
        devices=st.lists(frames.ids, max_size=3).map(tuple),
        step_rows=st.lists(frames.lengths, max_size=5).map(tuple),
        step_times_s=st.lists(st.floats(0.0, 10.0), max_size=5).map(tuple),
        native_build=frames.ids,
        is_reproducible=st.booleans(),
        residents=st.lists(frames.ids, max_size=3).map(tuple),
        refused=st.dictionaries(frames.ids, frames.ids, max_size=3),
        made_for=st.dictionaries(
            frames.ids, st.builds(MadeFor, frames.ids, frames.ids), max_size=3
        ),
    )
)
def test_a_description_survives_the_wire(description: WorkerDescription) -> None:
    assert codec.decode_description(codec.encode_description(description)) == description


def test_token_ids_travel_as_little_endian_int32() -> None:
    item = verify_item("a", TokenTree.of([258], [-1]))
    message = target_pb2.VerifyFrame.FromString(VERIFY.encode(VerifyFrame((item,)))[0])
    assert message.items[0].tree_token_ids == b"\x02\x01\x00\x00"
    assert message.items[0].tree_parents == b"\xff\xff\xff\xff"


def test_a_public_array_has_the_bytes_of_a_packed_one() -> None:
    tree = common_pb2.TokenTree(token_ids=[258, -1]).SerializeToString()
    assert tree == b"\x0a\x08" + b"\x02\x01\x00\x00" + b"\xff\xff\xff\xff"


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 1000])
def test_arrays_of_every_length_survive_the_drafter_protocol(size: int) -> None:
    tree = TokenTree.chain(list(range(2**31 - size, 2**31)))
    survival = np.linspace(1.0, 0.0, size, dtype=np.float32)
    frame = ProposalFrame((Proposal("a", 1, 2, 3, tree, survival),))
    assert same(PROPOSAL.decode(PROPOSAL.encode(frame)[0]).frame, frame)


def test_decoded_arrays_are_views_of_the_message_and_read_only() -> None:
    frame = VERIFY.decode(VERIFY.encode(VerifyFrame((verify_item("a"),)))[0]).frame
    delta = frame.items[0].delta
    assert not delta.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        delta[0] = 1


def test_wide_arrays_are_narrowed_on_the_wire() -> None:
    wide: Any = np.array([1, 2, 3], dtype=np.int64)
    assert codec.unpack_tokens(codec.pack_tokens(wide), "x").tolist() == [1, 2, 3]


def test_a_malformed_item_is_refused_and_the_others_are_decoded() -> None:
    message = target_pb2.VerifyFrame(released=["gone"])
    good = target_pb2.VerifyItem(request_id="good", delta=b"\x01\x00\x00\x00")
    torn = target_pb2.VerifyItem(request_id="torn", generation=7, delta=b"\x01\x00\x00")
    empty = target_pb2.VerifyItem(request_id="empty")
    uneven = target_pb2.VerifyItem(
        request_id="uneven",
        delta=b"\x01\x00\x00\x00",
        tree_token_ids=bytes(8),
        tree_parents=bytes(4),
    )
    message.items.extend([torn, good, empty, uneven])
    decoded = VERIFY.decode(message.SerializeToString())
    assert [item.request_id for item in decoded.frame.items] == ["good"]
    assert decoded.frame.released == ("gone",)
    assert [(r.request_id, r.generation) for r in decoded.refusals] == [
        ("torn", 7),
        ("empty", 0),
        ("uneven", 0),
    ]
    assert {refusal.code for refusal in decoded.refusals} == {ProtocolError.code}
    assert "3 bytes" in decoded.refusals[0].message


def test_an_undecodable_verdict_becomes_a_refusal_of_its_item() -> None:
    bad = target_pb2.Verdict(request_id="a", generation=3, path=bytes(4), token_ids=bytes(4))
    message = target_pb2.VerdictFrame(verdicts=[bad])
    frame = VERDICT.decode(message.SerializeToString()).frame
    assert frame.verdicts == ()
    assert [(r.request_id, r.generation) for r in frame.refusals] == [("a", 3)]
    assert "1 accepted nodes and 1 tokens" in frame.refusals[0].message


@pytest.mark.parametrize("field", ["path", "token_ids"])
def test_a_torn_verdict_names_the_array(field: str) -> None:
    torn = target_pb2.Verdict(request_id="a", token_ids=bytes(4))
    setattr(torn, field, bytes(5))
    (refusal,) = VERDICT.decode(
        target_pb2.VerdictFrame(verdicts=[torn]).SerializeToString()
    ).frame.refusals
    assert refusal.message == f"{field} has 5 bytes; i32[] takes a multiple of 4"


def test_a_verdict_has_a_log_probability_for_each_token_or_none() -> None:
    odd = target_pb2.Verdict(
        request_id="a",
        generation=3,
        path=bytes(4),
        token_ids=bytes(8),
        logprobs=common_pb2.Logprobs(logprobs=[-1.0], num_top=[0]),
    )
    event = coordinator_pb2.TokenEvent(
        request_id="a", position=4, token_ids=bytes(8), logprobs=odd.logprobs
    )
    verdicts = VERDICT.decode(target_pb2.VerdictFrame(verdicts=[odd]).SerializeToString()).frame
    (refusal,) = verdicts.refusals
    assert (refusal.generation, refusal.message) == (3, "verdict has 2 tokens and 1 logprobs")
    events = EVENT.decode(coordinator_pb2.EventFrame(events=[event]).SerializeToString()).frame
    assert events.events[0].error_message == "event has 2 tokens and 1 logprobs"
    assert (events.events[0].position, len(events.events[0].token_ids)) == (4, 0)


@pytest.mark.parametrize(
    ("token_ids", "survival", "problem"),
    [([5, 6], [1.0], "2 token ids and 1 parents"), ([5], [1.0, 0.5], "2 survival values")],
)
def test_an_unreadable_proposal_reads_as_a_refusal_and_the_others_live_on(
    token_ids: list[int], survival: list[float], problem: str
) -> None:
    tree = common_pb2.TokenTree(token_ids=token_ids, parents=[-1])
    bad = draft_pb2.Proposal(request_id="a", generation=3, tree=tree, survival=survival)
    good = draft_pb2.Proposal(request_id="b")
    message = draft_pb2.ProposalFrame(proposals=[bad, good])
    frame = PROPOSAL.decode(message.SerializeToString()).frame
    assert [each.request_id for each in frame.proposals] == ["b"]
    (refusal,) = frame.refusals
    assert (refusal.request_id, refusal.generation, refusal.code) == ("a", 3, ProtocolError.code)
    assert problem in refusal.message


def test_tokens_without_parents_are_a_refusal_and_no_empty_tree() -> None:
    tree = common_pb2.TokenTree(token_ids=[5])
    message = draft_pb2.ProposalFrame(proposals=[draft_pb2.Proposal(request_id="a", tree=tree)])
    frame = PROPOSAL.decode(message.SerializeToString()).frame
    assert frame.proposals == ()
    assert "1 token ids and 0 parents" in frame.refusals[0].message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 1.5])
def test_a_survival_that_is_not_a_probability_is_refused(value: float) -> None:
    tree = TokenTree.chain([1, 2])
    survival = np.array([0.5, value], dtype=np.float32)
    proposal = Proposal("a", 1, 0, 0, tree, survival)
    frame = PROPOSAL.decode(PROPOSAL.encode(ProposalFrame((proposal,)))[0]).frame
    assert frame.proposals == ()
    assert "no probability" in frame.refusals[0].message


@pytest.mark.parametrize("parents", [[0, 0], [1, -1], [-1, 500], [-2, 0]])
def test_a_tree_with_parents_that_lead_nowhere_is_refused(parents: list[int]) -> None:
    tree = TokenTree.of([1, 2], parents)
    good = Proposal("good", 1, 0, 0, TokenTree.chain([3]), np.ones(1, np.float32))
    bad = Proposal("bad", 1, 0, 0, tree, np.ones(2, np.float32))

    proposed = PROPOSAL.decode(PROPOSAL.encode(ProposalFrame((bad, good)))[0]).frame
    asked = VERIFY.decode(VERIFY.encode(VerifyFrame((verify_item("a", tree), verify_item("b"))))[0])

    assert [proposal.request_id for proposal in proposed.proposals] == ["good"]
    assert [refusal.request_id for refusal in proposed.refusals] == ["bad"]
    assert "parent" in proposed.refusals[0].message
    assert [item.request_id for item in asked.frame.items] == ["b"]
    assert [refusal.request_id for refusal in asked.refusals] == ["a"]


def test_each_worker_answers_malformed_items_in_its_own_frame() -> None:
    refusals = (Refusal("a", 1, "protocol_error", "why"),)
    assert ANSWER_AS_TARGET.answer is not None
    assert ANSWER_AS_TARGET.answer(refusals).refusals == refusals
    assert ANSWER_AS_DRAFTER.answer is not None
    assert ANSWER_AS_DRAFTER.answer(refusals).refusals == refusals
    assert ANSWER_AS_COORDINATOR.answer is not None
    (event,) = ANSWER_AS_COORDINATOR.answer(refusals).events
    expected = TokenEvent(
        "a", 0, token_array([]), (), FinishReason.ERROR, None, "protocol_error", "why"
    )
    assert same(event, expected)


def test_an_undecodable_event_ends_its_request_with_an_error() -> None:
    bad = coordinator_pb2.TokenEvent(request_id="a", position=5, token_ids=b"\x00")
    frame = EVENT.decode(coordinator_pb2.EventFrame(events=[bad]).SerializeToString()).frame
    (event,) = frame.events
    assert event.finish_reason is FinishReason.ERROR
    assert (event.request_id, event.position, event.error_code) == ("a", 5, ProtocolError.code)
    assert event.error_message == "token_ids has 1 bytes; i32[] takes a multiple of 4"


def test_a_request_without_parameters_is_refused() -> None:
    params = common_pb2.SamplingParams()
    speculation = coordinator_pb2.SpeculationOptions()
    requests = [
        coordinator_pb2.Request(id="a", prompt_ids=bytes(4), speculation=speculation),
        coordinator_pb2.Request(id="b", prompt_ids=bytes(4), params=params),
        coordinator_pb2.Request(id="c", params=params, speculation=speculation),
    ]
    message = coordinator_pb2.SubmitFrame(requests=requests, cancelled=["d"])
    decoded = SUBMIT.decode(message.SerializeToString())
    assert (decoded.frame.requests, decoded.frame.cancelled) == ((), ("d",))
    assert [(each.request_id, each.generation, each.message) for each in decoded.refusals] == [
        ("a", 0, "params is absent; send the request's own"),
        ("b", 0, "speculation is absent; send the request's own"),
        ("c", 0, "prompt_ids is empty; send at least one token"),
    ]


@pytest.mark.parametrize("field", ["prompt_ids", "output_ids"])
def test_a_torn_array_is_refused_with_its_name(field: str) -> None:
    torn = coordinator_pb2.Request(
        id="a",
        prompt_ids=bytes(4),
        params=common_pb2.SamplingParams(),
        speculation=coordinator_pb2.SpeculationOptions(),
    )
    setattr(torn, field, bytes(7))
    decoded = SUBMIT.decode(coordinator_pb2.SubmitFrame(requests=[torn]).SerializeToString())
    assert [refusal.message for refusal in decoded.refusals] == [
        f"{field} has 7 bytes; i32[] takes a multiple of 4"
    ]


@pytest.mark.parametrize("field", ["delta", "tree_token_ids", "tree_parents"])
def test_a_torn_item_is_refused_with_the_name_of_the_array(field: str) -> None:
    torn = target_pb2.VerifyItem(request_id="a", generation=3, delta=bytes(4))
    setattr(torn, field, bytes(9))
    decoded = VERIFY.decode(target_pb2.VerifyFrame(items=[torn]).SerializeToString())
    expected = Refusal(
        "a", 3, ProtocolError.code, f"{field} has 9 bytes; i32[] takes a multiple of 4"
    )
    assert decoded.refusals == (expected,)


def test_a_bias_without_a_value_for_each_token_is_refused() -> None:
    params = common_pb2.SamplingParams(logit_bias_token_ids=[1, 2], logit_bias_values=[0.5])
    commit = draft_pb2.Commit(request_id="a", generation=2, params=params)
    good = draft_pb2.Commit(request_id="b")
    message = draft_pb2.CommitFrame(commits=[commit, good], released=["c"])
    decoded = COMMIT.decode(message.SerializeToString())
    assert [each.request_id for each in decoded.frame.commits] == ["b"]
    assert decoded.frame.released == ("c",)
    (refusal,) = decoded.refusals
    assert (refusal.request_id, refusal.generation, refusal.code) == ("a", 2, ProtocolError.code)
    assert "2 logit_bias_token_ids and 1 logit_bias_values" in refusal.message


def test_a_negative_seed_travels_as_its_64_bits() -> None:
    params = SamplingParams(seed=-1)
    assert codec.decode_params(codec.encode_params(params)).seed == 2**64 - 1


def test_logprobs_that_do_not_add_up_are_refused() -> None:
    for broken in (
        common_pb2.Logprobs(logprobs=[-1.0, -2.0], num_top=[0]),
        common_pb2.Logprobs(logprobs=[-1.0], num_top=[2]),
        common_pb2.Logprobs(
            logprobs=[-1.0], num_top=[1], top_token_ids=[5], top_logprobs=[-1.0, -2.0]
        ),
    ):
        with pytest.raises(ProtocolError):
            codec.decode_logprobs(broken)


def test_an_unknown_finish_reason_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="99"):
        codec.decode_finish(99)


def test_bytes_that_are_not_a_frame_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="not a VerifyFrame"):
        VERIFY.decode(b"\xff\xff\xff")


def test_log_probabilities_keep_single_precision() -> None:
    entry = TokenLogprob(-0.1, ((3, -0.1), (4, -2.5)))
    event = TokenEvent("a", 0, token_array([3]), (entry,))
    (read,) = EVENT.decode(EVENT.encode(EventFrame((event,)))[0]).frame.events
    assert read.logprobs[0].logprob == pytest.approx(-0.1, rel=1e-7)
    assert [token for token, _ in read.logprobs[0].top] == [3, 4]
