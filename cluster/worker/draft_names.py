"""Names of requests within a drafter; every link has a name space of its own.

Records are rebuilt by hand, since dataclasses.replace takes several times as long in every round.
"""

from __future__ import annotations

from cluster.core import Commit, Observation, Proposal, TokenTree
from cluster.messages import Refusal


def name_within(link: int, request_id: str) -> str:
    """The request's name within the drafter."""
    return f"{link}/{request_id}"


def renamed_commit(link: int, commit: Commit) -> Commit:
    return Commit(
        name_within(link, commit.request_id),
        commit.generation,
        commit.base_len,
        commit.prefix_hash,
        commit.token_ids,
        commit.prompt_len,
        commit.max_nodes,
        commit.task,
        commit.params,
        commit.tenant,
    )


def renamed_proposal(proposal: Proposal, request_id: str) -> Proposal:
    """A copy with its own arrays: in-process links pass references, and drafters reuse arrays."""
    tree = TokenTree(proposal.tree.token_ids.copy(), proposal.tree.parents.copy())
    return Proposal(
        request_id,
        int(proposal.generation),
        int(proposal.base_len),
        int(proposal.prefix_hash),
        tree,
        proposal.survival.copy(),
        proposal.drafter,
        bool(proposal.is_complete),
    )


def renamed_observation(observation: Observation, request_id: str) -> Observation:
    loss = observation.log_loss
    return Observation(
        request_id,
        int(observation.generation),
        int(observation.have_len),
        None if loss is None else float(loss),
    )


def renamed_refusal(refusal: Refusal, request_id: str) -> Refusal:
    return Refusal(request_id, refusal.generation, refusal.code, refusal.message)
