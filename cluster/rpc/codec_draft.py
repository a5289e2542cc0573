"""The frames between coordinator and drafter."""

from __future__ import annotations

from cluster.client.generated.common_pb2 import TokenTree
from cluster.core import Commit, Completion, Observation, Proposal
from cluster.errors import ProtocolError
from cluster.messages import CommitFrame, ProposalFrame, Refusal
from cluster.rpc.codec import (
    decode_params,
    decode_refusal,
    encode_params,
    encode_refusal,
    make_tree,
    read_floats,
    read_tokens,
    refusal_of,
)
from cluster.rpc.frames import Decoded, FrameCodec
from cluster.rpc.generated import draft_pb2 as pb
from cluster.spec.tree_check import ANY_VOCABULARY, problems_of_proposals


def _encode_commit(commit: Commit) -> pb.Commit:
    return pb.Commit(
        request_id=commit.request_id,
        generation=commit.generation,
        base_len=commit.base_len,
        prefix_hash=commit.prefix_hash,
        token_ids=commit.token_ids.tolist(),
        prompt_len=commit.prompt_len,
        max_nodes=commit.max_nodes,
        task=commit.task,
        params=None if commit.params is None else encode_params(commit.params),
        tenant=commit.tenant,
    )


def _decode_commit(message: pb.Commit) -> Commit:
    return Commit(
        request_id=message.request_id,
        generation=message.generation,
        base_len=message.base_len,
        prefix_hash=message.prefix_hash,
        token_ids=read_tokens(message.token_ids),
        prompt_len=message.prompt_len,
        max_nodes=message.max_nodes,
        task=message.task,
        params=decode_params(message.params) if message.HasField("params") else None,
        tenant=message.tenant,
    )


def _encode_commits(frame: CommitFrame) -> pb.CommitFrame:
    return pb.CommitFrame(commits=map(_encode_commit, frame.commits), released=frame.released)


def _decode_commits(message: pb.CommitFrame) -> Decoded[CommitFrame]:
    commits: list[Commit] = []
    refusals: list[Refusal] = []
    for commit in message.commits:
        try:
            commits.append(_decode_commit(commit))
        except ProtocolError as error:
            refusals.append(refusal_of(commit.request_id, commit.generation, error))
    return Decoded(CommitFrame(tuple(commits), tuple(message.released)), tuple(refusals))


def _encode_proposal(proposal: Proposal) -> pb.Proposal:
    return pb.Proposal(
        request_id=proposal.request_id,
        generation=proposal.generation,
        base_len=proposal.base_len,
        prefix_hash=proposal.prefix_hash,
        tree=TokenTree(
            token_ids=proposal.tree.token_ids.tolist(), parents=proposal.tree.parents.tolist()
        ),
        survival=proposal.survival.tolist(),
        drafter=proposal.drafter,
        is_complete=proposal.is_complete,
    )


def _decode_proposal(message: pb.Proposal) -> Proposal:
    return Proposal(
        request_id=message.request_id,
        generation=message.generation,
        base_len=message.base_len,
        prefix_hash=message.prefix_hash,
        tree=make_tree(read_tokens(message.tree.token_ids), read_tokens(message.tree.parents)),
        survival=read_floats(message.survival),
        drafter=message.drafter,
        is_complete=message.is_complete,
    )


def _encode_observation(observation: Observation) -> pb.Observation:
    return pb.Observation(
        request_id=observation.request_id,
        generation=observation.generation,
        have_len=observation.have_len,
        log_loss=observation.log_loss,
    )


def _decode_observation(message: pb.Observation) -> Observation:
    return Observation(
        message.request_id,
        message.generation,
        message.have_len,
        message.log_loss if message.HasField("log_loss") else None,
    )


def _encode_proposals(frame: ProposalFrame) -> pb.ProposalFrame:
    return pb.ProposalFrame(
        proposals=map(_encode_proposal, frame.proposals),
        observations=map(_encode_observation, frame.observations),
        refusals=map(encode_refusal, frame.refusals),
        pages_in_use=frame.pages_in_use,
        pages_total=frame.pages_total,
        num_requests=frame.num_requests,
        draft_time_s=frame.draft_time_s,
        completions=(
            pb.Completion(
                request_id=each.request_id, generation=each.generation, base_len=each.base_len
            )
            for each in frame.completions
        ),
    )


def _decode_proposals(message: pb.ProposalFrame) -> Decoded[ProposalFrame]:
    proposals = [_decode_proposal(proposal) for proposal in message.proposals]
    refusals = [decode_refusal(refusal) for refusal in message.refusals]
    problems = problems_of_proposals(proposals, ANY_VOCABULARY)
    refusals += [
        refusal_of(each.request_id, each.generation, ProtocolError(problem))
        for each, problem in zip(proposals, problems, strict=True)
        if problem is not None
    ]
    frame = ProposalFrame(
        proposals=tuple(
            each for each, problem in zip(proposals, problems, strict=True) if problem is None
        ),
        observations=tuple(map(_decode_observation, message.observations)),
        refusals=tuple(refusals),
        pages_in_use=message.pages_in_use,
        pages_total=message.pages_total,
        num_requests=message.num_requests,
        draft_time_s=message.draft_time_s,
        completions=tuple(
            Completion(each.request_id, each.generation, each.base_len)
            for each in message.completions
        ),
    )
    return Decoded(frame)


COMMIT = FrameCodec("CommitFrame", _encode_commits, _decode_commits, pb.CommitFrame.FromString)
PROPOSAL = FrameCodec(
    "ProposalFrame", _encode_proposals, _decode_proposals, pb.ProposalFrame.FromString
)
