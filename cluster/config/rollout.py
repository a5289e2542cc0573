"""Rollouts: how a drafter comes to replace another one."""

from __future__ import annotations

from typing import Annotated

from cluster.config.parse import Range
from cluster.records import frozen


@frozen
class RolloutConfig:
    """How a drafter comes to replace another one. See rollout.md."""

    replaces: str = ""
    """The drafter whose place it takes, in all texts, once it has shown to draft better. Both run
    in the same kind of place: inside the target, or in the pool."""
    canary_share: Annotated[float, Range(0.001, 1)] = 0.05
    """The share of requests, by a hash of their ids, in which both draft and are compared. Only
    there the new one is verified at first, and there the former one goes on to be compared."""
