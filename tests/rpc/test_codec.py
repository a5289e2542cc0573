"""Frames survive encoding and decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.client.generated import common_pb2
from cluster.core import (
    Proposal,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    TokenTree,
    token_array,
)
from cluster.messages import (
    EventFrame,
    PoolTree,
    ProposalFrame,
    StepFrame,
    WorkerDescription,
)
from cluster.rpc.codec import DESCRIPTION, PARAMS
from cluster.rpc.codec_arrays import TOKENS
from cluster.rpc.codec_coordinator import EVENT, SUBMIT
from cluster.rpc.codec_draft import COMMIT, PROPOSAL
from cluster.rpc.codec_target import STEPS, VERDICT
from cluster.rpc.frames import FrameCodec
from cluster.rpc.generated import target_pb2
from tests.support.rpc import frames_strategy as frames
from tests.support.rpc.frames_strategy import same, text

FIELD_OF_A_NEWER_RELEASE = b"\xc2\x3e\x03new"  # number 1000, three bytes

ROUND_TRIPS = [
    pytest.param(STEPS, frames.step_frames, id="steps"),
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
    decoded = frame_codec.decode(encoded + FIELD_OF_A_NEWER_RELEASE)
    assert decoded.refusals == ()
    assert same(decoded.frame, frame)


@settings(max_examples=30, deadline=None)
@given(description=frames.of(WorkerDescription))
def test_a_description_survives_the_wire(description: WorkerDescription) -> None:
    assert DESCRIPTION.decode(DESCRIPTION.encode(description)) == description


def test_token_ids_travel_as_little_endian_int32() -> None:
    tree = PoolTree(
        "a", 1, 2, 3, TokenTree.of([258], [-1]), np.ones(1, np.float32), np.array([5], np.uint32)
    )
    message = target_pb2.StepFrame.FromString(STEPS.encode(StepFrame(trees=(tree,)))[0])
    assert message.trees[0].token_ids == b"\x02\x01\x00\x00"
    assert message.trees[0].parents == b"\xff\xff\xff\xff"
    assert message.trees[0].sources == b"\x05\x00\x00\x00"


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
    frame = STEPS.decode(STEPS.encode(StepFrame((text("a"),)))[0]).frame
    token_ids = frame.opens[0].token_ids
    assert not token_ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        token_ids[0] = 1


def test_wide_arrays_are_narrowed_on_the_wire() -> None:
    wide: Any = np.array([1, 2, 3], dtype=np.int64)
    assert TOKENS.unpack(TOKENS.pack(wide), "x").tolist() == [1, 2, 3]


def test_a_negative_seed_travels_as_its_64_bits() -> None:
    params = SamplingParams(seed=-1)
    assert PARAMS.decode(PARAMS.encode(params)).seed == 2**64 - 1


def test_log_probabilities_keep_single_precision() -> None:
    entry = TokenLogprob(-0.1, ((3, -0.1), (4, -2.5)))
    event = TokenEvent("a", 0, token_array([3]), (entry,))
    (read,) = EVENT.decode(EVENT.encode(EventFrame((event,)))[0]).frame.events
    assert read.logprobs[0].logprob == pytest.approx(-0.1, rel=1e-7)
    assert [token for token, _ in read.logprobs[0].top] == [3, 4]
