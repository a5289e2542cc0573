"""The sections of what proves in production that drafts pay, or that one drafter does better."""

from __future__ import annotations

from typing import Annotated, ClassVar

from cluster.config.parse import Folder, NonNegativeFloat, Range, Share
from cluster.errors import ConfigError
from cluster.records import frozen

# Twice its length before a window and after it is compared with it.
_LEAST_WINDOWS = 6


@frozen
class AuditConfig:
    """Finished texts that are checked once more; see docs/proof.md."""

    share: Share = 0.0
    """Share of the finished texts that a target verifies again, in idle time where there is some,
    at another target if there is one. 0 = none."""
    tie_margin: NonNegativeFloat = 0.05
    """A token counts as a near-tie, and not as a mismatch, if logits that differ by so much would
    have given it: other batches round otherwise. With target.engine.reproducible it is 0."""
    folder: Folder = ""
    """Mismatches are kept here with their token ids, as files that the owner alone may read, 64 at
    most. Empty = the log and the metrics alone tell of them, without any text."""


@frozen
class SwitchbackConfig:
    """Windows without drafts, in which plain decoding is measured; see docs/proof.md."""

    REMOVED: ClassVar = {
        "request_share": "windows measure without the bias of shared batches; set period_s",
    }

    period_s: Annotated[float, Range(0, 86_400)] = 0.0
    """In every period of this length there is one plain window, at the same time at all
    coordinators. 0 = none."""
    # The first two seconds of a window are not counted.
    window_s: Annotated[float, Range(4, 3_600)] = 10.0
    """The length of a plain window; a sixth of the period at most, for it is compared with the time
    around it."""

    def __post_init__(self) -> None:
        if 0.0 < self.period_s < _LEAST_WINDOWS * self.window_s:
            raise ConfigError.at(
                "period_s",
                f"{self.period_s:g} s are less than {_LEAST_WINDOWS} windows of "
                f"{self.window_s:g} s; raise it or lower window_s",
            )


@frozen
class RolloutConfig:
    """How a drafter comes to replace another one. See rollout.md."""

    replaces: str = ""
    """The drafter whose place it takes, in all texts, once it has shown to draft better. Both run
    in the same kind of place: inside the target, or in the pool."""
    canary_share: Annotated[float, Range(0.001, 1)] = 0.05
    """The share of requests, by a hash of their ids, in which both draft and are compared. Only
    there the new one is verified at first, and there the former one goes on to be compared."""
