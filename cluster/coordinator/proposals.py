"""What drafters propose, held against the text they propose it for."""

from __future__ import annotations

import math

from cluster.coordinator.held import HeldTree
from cluster.coordinator.replica import Subscription
from cluster.coordinator.session import Session
from cluster.core import Observation, Proposal

# Weight of the newest commit in a drafter's running loss on one text.
_LOSS_WEIGHT = 0.1


def problem_of(proposal: Proposal, session: Session) -> str | None:
    """Why a proposal of the right generation cannot be one for this text, or None.

    What it is in itself has been looked at before (`spec.tree_check`).
    """
    if proposal.base_len > len(session.tokens):
        return (
            f"base_len {proposal.base_len} lies beyond the {len(session.tokens)} committed tokens"
        )
    if proposal.prefix_hash != session.tokens.hash_at(proposal.base_len):
        return f"the prefix hash at {proposal.base_len} is not that of the committed tokens"
    return None


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
    if loss is None or not math.isfinite(loss):
        return
    mean = loss if subscription.log_loss is None else subscription.log_loss
    subscription.log_loss = mean + _LOSS_WEIGHT * (loss - mean)
