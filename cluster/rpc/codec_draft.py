"""The frames between coordinator and drafter."""

from __future__ import annotations

from typing import Any

from cluster.client.generated.common_pb2 import TokenTree as TreeMessage
from cluster.core import Commit, Proposal, TokenTree
from cluster.messages import CommitFrame, ProposalFrame
from cluster.requests.acceptance_law import NO_LAWS
from cluster.rpc.codec import PARTS
from cluster.rpc.codec_arrays import TOKENS, make_tree
from cluster.rpc.codec_records import ByHand, record_codec
from cluster.rpc.frames import FrameCodec, refusing
from cluster.rpc.generated import draft_pb2 as pb


def _encode_tree(proposal: Proposal) -> dict[str, Any]:
    tree = proposal.tree
    return {"tree": TreeMessage(token_ids=tree.token_ids.tolist(), parents=tree.parents.tolist())}


def _decode_tree(message: pb.Proposal) -> TokenTree:
    """An absent one is empty."""
    return make_tree(TOKENS.read(message.tree.token_ids), TOKENS.read(message.tree.parents))


_PROPOSAL = record_codec(
    Proposal,
    pb.Proposal,
    by_hand={
        "tree": ByHand(("tree",), _encode_tree, _decode_tree),
        "laws": ByHand((), None, lambda message: NO_LAWS),
    },
)
COMMIT = FrameCodec(CommitFrame, pb.CommitFrame, [refusing(record_codec(Commit, pb.Commit, PARTS))])
PROPOSAL = FrameCodec(ProposalFrame, pb.ProposalFrame, [_PROPOSAL])
