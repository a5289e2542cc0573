"""Why a request had no speculative step, as its answer says."""

from __future__ import annotations

import enum

from cluster.requests.fields import PlainWhy


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
    TOO_SHORT = "too_short"


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


# By why a step had none.
OF_STEPS = {
    PlainWhy.NO_DRAFTS: IdleReason.NO_DRAFTS,
    PlainWhy.GUARD: IdleReason.PAUSED,
    PlainWhy.NOT_WORTH_IT: IdleReason.NOT_WORTH_IT,
    PlainWhy.UNMEASURED: IdleReason.WARMING_UP,
    PlainWhy.FAULT: IdleReason.DRAFTERS_DOWN,
    PlainWhy.SCHEDULE: IdleReason.SCHEDULE,
    PlainWhy.SWITCHBACK: IdleReason.SWITCHBACK,
}
