"""The sections of how much is drafted, and of what proves in production that drafts pay, or that
one drafter does better."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from cluster.config.parse import (
    Folder,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
    Share,
    check_that,
)
from cluster.records import frozen

# Twice its length before a window and after it is compared with it.
_LEAST_WINDOWS = 6
_LOOP_DECIDES = "the control loop prices drafts in every step, so remove it"
_NO_CLOCK = "caps go by class, task and load alone, so remove it"


@frozen
class DraftLengthOverride:
    """A rule for some loads and requests: all of its conditions must hold."""

    REMOVED: ClassVar = {"hours": _NO_CLOCK, "days": _NO_CLOCK}

    load_from: NonNegativeInt = 0
    """From so many sequences in a step on."""
    class_: str = ""
    """Requests of this coordinator.latency_classes; empty = all."""
    task: str = ""
    """Requests of this task class; empty = all."""
    max_draft_tokens: NonNegativeInt = 0
    """Draft tokens that one step may then verify per sequence."""


@frozen
class DraftLengthConfig:
    """Caps that lower how many draft tokens a step may verify for a sequence. None raises it:
    coordinator.max_draft_tokens and a request's own limit stay above, what pays and what may be
    lost below. See draft-length.md."""

    REMOVED: ClassVar = {
        "kind=alpha": "the control loop leaves drafters that do not pay alone, so set adaptive",
        "stop_below": _LOOP_DECIDES,
        "return_at": _LOOP_DECIDES,
        "time_zone": _NO_CLOCK,
    }

    kind: Literal["adaptive", "constant", "heuristic", "window", "threshold"] = "adaptive"
    """adaptive = no further limit. constant = num_tokens. heuristic = 2 more after a step whose
    drafts were accepted to their depth, else 1 fewer. window = 1 more or 1 fewer by the acceptance
    of the latest steps. threshold = only tokens that are probable enough after those before
    them."""
    num_tokens: NonNegativeInt = 5
    """constant: so many. heuristic, window: those of a text's first step."""
    min_tokens: PositiveInt | None = None
    """heuristic, window: never fewer; null = 1 and 3."""
    max_tokens: PositiveInt | None = None
    """heuristic, window: never more; null = coordinator.max_draft_tokens and 12."""
    num_steps: PositiveInt = 10
    """window: the steps with drafts that count."""
    raise_above: Share = 0.9
    """window: 1 more where a greater share of their depth was accepted, ..."""
    lower_below: Share = 0.6
    """... 1 fewer where a smaller one was."""
    threshold: Share = 0.4
    """threshold: the least probability, calibrated, that a token follows those before it."""
    overrides: tuple[DraftLengthOverride, ...] = ()
    """The first rule that fits a sequence lowers its limit further."""


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
        check_that(
            self.period_s == 0.0 or self.period_s >= _LEAST_WINDOWS * self.window_s,
            "period_s",
            f"{self.period_s:g} s are less than {_LEAST_WINDOWS} windows of {self.window_s:g} s; "
            "raise it or lower window_s",
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
