"""The frames between coordinator and drafter."""

from __future__ import annotations

from typing import Any

from cluster.client.generated.common_pb2 import TokenTree as TreeMessage
from cluster.core import Commit, Proposal, TokenTree
from cluster.errors import ProtocolError
from cluster.messages import CommitFrame, ProposalFrame, Refusal
from cluster.requests.acceptance_law import NO_LAWS
from cluster.rpc.codec import PARTS
from cluster.rpc.codec_arrays import TOKENS, make_tree
from cluster.rpc.codec_records import ByHand, record_codec
from cluster.rpc.frames import FrameCodec, refusal_of, refusing
from cluster.rpc.generated import draft_pb2 as pb
from cluster.spec.tree_check import ANY_VOCABULARY, problems_of_proposals


def _encode_tree(proposal: Proposal) -> dict[str, Any]:
    tree = proposal.tree
    return {"tree": TreeMessage(token_ids=tree.token_ids.tolist(), parents=tree.parents.tolist())}


def _decode_tree(message: pb.Proposal) -> TokenTree:
    """An absent one is empty."""
    return make_tree(TOKENS.read(message.tree.token_ids), TOKENS.read(message.tree.parents))


def _decode_proposals(message: pb.ProposalFrame) -> tuple[Proposal | Refusal, ...]:
    proposals = [*map(_PROPOSAL.decode, message.proposals)]
    problems = problems_of_proposals(proposals, ANY_VOCABULARY)
    return tuple(
        each
        if problem is None
        else refusal_of(each.request_id, each.generation, ProtocolError(problem))
        for each, problem in zip(proposals, problems, strict=True)
    )


_PROPOSAL = record_codec(
    Proposal,
    pb.Proposal,
    by_hand={
        "tree": ByHand(("tree",), _encode_tree, _decode_tree),
        "laws": ByHand((), None, lambda message: NO_LAWS),
    },
)
COMMIT = FrameCodec(CommitFrame, pb.CommitFrame, [refusing(record_codec(Commit, pb.Commit, PARTS))])
PROPOSAL = FrameCodec(
    ProposalFrame,
    pb.ProposalFrame,
    by_hand={
        "proposals": ByHand(
            ("proposals",),
            lambda frame: {"proposals": map(_PROPOSAL.encode, frame.proposals)},
            _decode_proposals,
        )
    },
)
