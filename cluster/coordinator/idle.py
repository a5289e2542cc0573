"""Why a request had no speculative step: one decision over plain facts, for its answer."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Set as AbstractSet

from cluster.requests.fields import PlainWhy
from cluster.spec import statistics

# Drafters that are not there so long after the coordinator's start do not just load.
_LOADING_S = 120.0


class IdleReason(enum.StrEnum):
    DISABLED = "disabled"
    NO_DRAFTER_FOR_MODEL = "no_drafter_for_model"
    DRAFTERS_DOWN = "drafters_down"
    WARMING_UP = "warming_up"
    NO_DRAFTS = "no_drafts"
    PAUSED = "paused"
    NOT_WORTH_IT = "not_worth_it"
    SCHEDULE = "schedule"
    SWITCHBACK = "switchback"
    TOO_SHORT = statistics.TOO_SHORT


# As clients are told them.
MEANINGS: dict[str, str] = {
    IdleReason.DISABLED: "the request or its task allows no drafts; beam searches have none",
    IdleReason.NO_DRAFTER_FOR_MODEL: "no drafter is configured, or none fits the model",
    IdleReason.DRAFTERS_DOWN: "its drafters are gone, did not come, or are left alone after "
    "faults; see /health and the server's log",
    IdleReason.WARMING_UP: "the server has just started, and its drafters still load",
    IdleReason.NO_DRAFTS: "its drafters had no draft for this text, or none in time",
    IdleReason.PAUSED: "drafts have cost more time than they saved of late, as much as they may",
    IdleReason.NOT_WORTH_IT: "making or verifying drafts would have cost more than it saves",
    IdleReason.SCHEDULE: "coordinator.draft_length allows such requests no drafts",
    IdleReason.SWITCHBACK: "plain decoding is measured, by coordinator.switchback",
    IdleReason.TOO_SHORT: "the answer was over before a step could have had drafts",
}


_REASONS = {
    PlainWhy.NO_DRAFTS: IdleReason.NO_DRAFTS,
    PlainWhy.GUARD: IdleReason.PAUSED,
    PlainWhy.NOT_WORTH_IT: IdleReason.NOT_WORTH_IT,
    PlainWhy.UNMEASURED: IdleReason.WARMING_UP,
    PlainWhy.FAULT: IdleReason.DRAFTERS_DOWN,
    PlainWhy.SCHEDULE: IdleReason.SCHEDULE,
    PlainWhy.SWITCHBACK: IdleReason.SWITCHBACK,
}


def idle_reason(
    *,
    is_enabled: bool,
    names: AbstractSet[str],
    refused: AbstractSet[str],
    usable: AbstractSet[str],
    seen: AbstractSet[str],
    uptime_s: float,
    steps: Counter[PlainWhy],
) -> IdleReason:
    """Return what kept a request from having a speculative step; of several things, the one that
    did so in most steps.

    names: of the drafters that may serve it.  refused: of those that were because they do not fit
    the model; usable: connected, and not left alone after faults; seen: connected at some time
    since the coordinator started, uptime_s ago.
    steps: its plain steps that could have had drafts, by why.
    """
    if not is_enabled:
        return IdleReason.DISABLED
    if names <= refused:
        return IdleReason.NO_DRAFTER_FOR_MODEL
    if names.isdisjoint(usable):
        # Those that are not there may still come.
        are_loading = names.isdisjoint(seen) and uptime_s < _LOADING_S
        return IdleReason.WARMING_UP if are_loading else IdleReason.DRAFTERS_DOWN
    why, reason = max(_REASONS.items(), key=lambda each: steps[each[0]])
    return reason if steps[why] else IdleReason.TOO_SHORT
