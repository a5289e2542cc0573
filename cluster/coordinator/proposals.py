"""What drafters propose, checked: nothing they send is trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.coordinator.held import HeldTree
from cluster.coordinator.replica import Subscription
from cluster.coordinator.session import Session
from cluster.core import FloatArray, Observation, Proposal, TokenTree
from cluster.errors import ProtocolError
from cluster.spec.forest import are_well_formed, concatenated
from cluster.spec.tree import check_tree

# No tree of use is larger; a longer one is rubbish that would cost the round loop time.
_MAX_PROPOSED_NODES = 4096
# Weight of the newest commit in a drafter's running loss on one text.
_LOSS_WEIGHT = 0.1


def problem_of(proposal: Proposal, session: Session) -> str | None:
    """Why a proposal of the right generation cannot be what an honest drafter sends, or None.

    O(1): most of the trees that are streamed are replaced before a batch could use them.  The
    tree itself is looked at by `problem_of_tree`.
    """
    if not 0 <= proposal.base_len <= len(session.tokens):
        return (
            f"base_len {proposal.base_len} lies beyond the {len(session.tokens)} committed tokens"
        )
    if proposal.prefix_hash != session.tokens.hash_at(proposal.base_len):
        return f"the prefix hash at {proposal.base_len} is not that of the committed tokens"
    if len(proposal.tree) > _MAX_PROPOSED_NODES:
        return f"{len(proposal.tree)} nodes; at most {_MAX_PROPOSED_NODES} are of any use"
    survival = proposal.survival
    if survival.shape != (len(proposal.tree),):
        return f"{survival.shape} survival values for {len(proposal.tree)} nodes"
    return None


def problem_of_tree(tree: TokenTree, survival: FloatArray, vocab_size: int) -> str | None:
    """Why a proposed tree is not one that could be verified, or None."""
    if not bool(np.all((survival >= 0.0) & (survival <= 1.0))):  # false for NaN, as it should be
        return "a survival probability lies outside [0, 1]"
    try:
        check_tree(tree, vocab_size)
    except ProtocolError as error:
        return error.message
    return None


def are_sound(held: Sequence[HeldTree], vocab_size: int) -> bool:
    """Whether `problem_of_tree` would find nothing wrong with any of them."""
    if not held:
        return True
    survival = concatenated([each.survival for each in held])
    if len(survival) and not (survival.min() >= 0.0 and survival.max() <= 1.0):
        return False  # NaN, too
    return are_well_formed([each.tree for each in held], vocab_size)


def keep_newest(subscription: Subscription, proposal: Proposal) -> None:
    """Keep the newest tree; one that was overtaken on the way changes nothing."""
    held = subscription.held
    if held is not None and proposal.base_len < held.proposed_len:
        return
    subscription.held = HeldTree(
        proposal.base_len, proposal.base_len, proposal.tree, proposal.survival
    )


def note_loss(subscription: Subscription, observation: Observation) -> None:
    """Keep the running mean of what the drafter lost on the committed tokens, if it says so."""
    loss = observation.log_loss
    if loss is None or not np.isfinite(loss):
        return
    mean = loss if subscription.log_loss is None else subscription.log_loss
    subscription.log_loss = mean + _LOSS_WEIGHT * (loss - mean)
