"""How long a drafter of which nothing is used is asked on, and when it is tried again.

The state behind `spec/demand.py`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

# Patience with a drafter of which nothing is accepted, in quarters of a round.  A tree that was not
# taken says most.  One that has not come may be that of a long prompt, which takes its time to
# read, and nodes that were taken may have been unlucky, or a measurement of what steps cost.
REFUSED = 4
DOUBTFUL = 1
_PATIENCE = 16 * REFUSED
_PROBE_PATIENCE = 4 * REFUSED
# A group is given up after two sessions' patience, and a little more for each that runs.
# Every accepted node makes up for one session's patience: drafts that save less than one step in
# sixteen are not worth drafting for everybody.
_GROUP_PATIENCE = 2 * _PATIENCE
_PATIENCE_PER_SEQUENCE = 4 * REFUSED
# One that costs next to nothing is waited for longer, and probed at the shortest interval.
_CHEAP_FACTOR = 2
_FIRST_INTERVAL = 32
_LAST_INTERVAL = 512
# One session in so many probes for its group; fewer could not move the whole batch's goodput.
_SESSIONS_PER_PROBE = 8
# Steps with accepted nodes that end a group's pause: one may be a measurement of what steps cost,
# and would set all sessions drafting.
_HITS_TO_WAKE = 3


class Mode(enum.StrEnum):
    """What is asked of a drafter for a session."""

    GROWING = "growing"
    PROBING = "probing"
    PARKED = "parked"


@dataclass(slots=True)
class Backoff:
    """Commits left until the next probe, and how many there were at first."""

    interval: int = 0
    countdown: int = 0

    def extend(self, *, is_cheap: bool) -> None:
        last = _FIRST_INTERVAL if is_cheap else _LAST_INTERVAL
        self.interval = min(max(2 * self.interval, _FIRST_INTERVAL), last)
        self.countdown = self.interval


@dataclass(slots=True)
class Asked:
    """One drafter of one session.

    quiet: patience used up.  recent: nodes taken of late.  has_offered: a tree came since it was
    last asked to begin.  num_untold: commits since it was parked.  num_drops: see `Load`.
    """

    mode: Mode
    num_drops: int
    backoff: Backoff
    quiet: int = 0
    recent: float = 0.0
    has_offered: bool = False
    num_untold: int = 0

    def begin(self, mode: Mode) -> None:
        if self.mode is Mode.PARKED:
            self.has_offered = False
        self.mode, self.quiet = mode, 0

    def patience(self, *, is_cheap: bool) -> int:
        if self.mode is Mode.PROBING:
            return _PROBE_PATIENCE
        return _PATIENCE * (_CHEAP_FACTOR if is_cheap else 1)


@dataclass(slots=True)
class Group:
    """All sessions of one task at one target and level, as to one drafter.

    num_probes: sessions that may begin to probe for it.  num_hits: steps with accepted nodes since
    the last of these was set.
    """

    is_parked: bool
    num_drops: int
    backoff: Backoff
    quiet: int = 0
    recent: float = 0.0
    num_probes: int = 0
    num_hits: int = 0

    def park(self, *, is_cheap: bool) -> None:
        self.is_parked, self.quiet, self.num_hits = True, 0, 0
        self.backoff.extend(is_cheap=is_cheap)

    def hit(self, num_accepted: int, patience: int, *, is_cheap: bool) -> None:
        """A step accepted so many nodes."""
        self.num_hits += 1
        if self.is_parked and self.num_hits >= _HITS_TO_WAKE:
            # With half of its patience: it has yet to earn what it had before.
            self.is_parked, self.num_probes, self.quiet = False, 0, patience // 2
            return
        self.quiet -= num_accepted * _PATIENCE * (_CHEAP_FACTOR if is_cheap else 1)
        if self.quiet <= 0 and not self.is_parked:
            self.backoff = Backoff()
        self.quiet = max(self.quiet, 0)

    def count_down(self, num_sequences: int, *, is_cheap: bool) -> None:
        """One more commit of a parked group."""
        self.backoff.countdown -= 1
        if self.backoff.countdown <= 0:
            self.backoff.extend(is_cheap=is_cheap)
            self.num_probes = math.ceil(num_sequences / _SESSIONS_PER_PROBE)
            self.num_hits = 0


@dataclass(slots=True)
class Load:
    """A target's level, and how often it has fallen."""

    level: int
    num_drops: int = 0


def group_patience(num_sequences: int, *, is_cheap: bool) -> int:
    """When a group of which so many sequences run is given up."""
    patience = _GROUP_PATIENCE + _PATIENCE_PER_SEQUENCE * num_sequences
    return patience * (_CHEAP_FACTOR if is_cheap else 1)
