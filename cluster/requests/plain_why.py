"""The reasons for steps without drafts."""

from __future__ import annotations

import enum


class PlainWhy(enum.IntEnum):
    """The reason why a step verified no drafts for a text."""

    NONE = 0  # it verified some, or none were wanted
    GUARD = 1  # drafts have lost as much time as the guard allows
    NO_DRAFTS = 2  # none were at hand
    NOT_WORTH_IT = 3  # verifying the drafts at hand, or making some, would not have paid
    UNMEASURED = 5  # step times are not known yet
    FAULT = 6  # the choice of nodes failed, or a step with drafts did
    SCHEDULE = 7  # coordinator.draft_length allows the text none
    SWITCHBACK = 9  # plain decoding is measured at this time
