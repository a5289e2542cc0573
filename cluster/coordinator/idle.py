"""Why a request had no speculative step: one decision over plain facts, for its answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class IdleReason(enum.StrEnum):
    DISABLED = "disabled"  # by the request or by the configuration of its task
    NO_DRAFTER_FOR_MODEL = "no_drafter_for_model"  # none is configured, or none fits the model
    DRAFTERS_DOWN = "drafters_down"  # they were there, and are gone or left alone after faults
    WARMING_UP = "warming_up"  # they load still, or had no draft for the text so far
    PAUSED = "paused"  # drafts had cost more than they brought, so none were asked for
    NOT_WORTH_IT = "not_worth_it"  # to verify drafts, or to make some, would not have paid


@dataclass(frozen=True, slots=True)
class Availability:
    """Of the drafters that may serve a request, how many there are.

    num_usable: connected, and not left alone after faults.  num_refused: refused because they do
    not fit the model.  num_seen: connected at some time since the coordinator started.
    """

    num_configured: int = 0
    num_usable: int = 0
    num_refused: int = 0
    num_seen: int = 0


@dataclass(slots=True)
class PlainSteps:
    """A request's decode steps without a draft, by why there was none."""

    num_paused: int = 0
    num_declined: int = 0
    num_without_drafts: int = 0

    def note(self, *, is_paused: bool, has_drafts: bool) -> None:
        """is_paused: drafters were asked for nothing.  has_drafts: some were at hand."""
        if is_paused:
            self.num_paused += 1
        elif has_drafts:
            self.num_declined += 1
        else:
            self.num_without_drafts += 1


def idle_reason(*, is_enabled: bool, drafters: Availability, steps: PlainSteps) -> IdleReason:
    """What kept a request without a speculative step from having one; where several things did,
    what did so in most steps."""
    if not is_enabled:
        return IdleReason.DISABLED
    if drafters.num_refused >= drafters.num_configured:
        return IdleReason.NO_DRAFTER_FOR_MODEL
    if not drafters.num_usable:
        return IdleReason.DRAFTERS_DOWN if drafters.num_seen else IdleReason.WARMING_UP
    most = max(steps.num_paused, steps.num_declined, steps.num_without_drafts)
    if steps.num_without_drafts == most:
        return IdleReason.WARMING_UP
    return IdleReason.PAUSED if steps.num_paused == most else IdleReason.NOT_WORTH_IT
