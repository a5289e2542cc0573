"""What drafters propose is held until a better proposal comes, or the text leaves it."""

from __future__ import annotations

from cluster.coordinator.texts import HeldTree, Text
from cluster.core import Proposal


def keep_newest(text: Text, drafter: str, proposal: Proposal) -> HeldTree:
    """The newest tree, which is kept; one that was overtaken on the way changes nothing."""
    held = text.held.get(drafter)
    if held is None or proposal.base_len >= held.proposed_len:
        length = proposal.base_len
        held = text.held[drafter] = HeldTree(length, length, proposal.tree, proposal.survival)
    return held
