"""How one drafter takes the place of another: trials at the same places, its lead, its phases."""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cluster.config.speculation import RolloutConfig
from cluster.core import EMPTY_TREE, Proposal, TokenTree
from cluster.spec import evidence
from cluster.spec.acceptance import JUDGED_RANK
from cluster.spec.step_profile import DRAFT_LENGTHS
from cluster.spec.token_log import TokenLog
from cluster.spec.tree import Floats, prune, walk

log = logging.getLogger(__name__)

# Places of one text that are judged together.
PLACES_OF_STRETCH = 10
# The most trees of one text, and the most of its places, that wait for their outcome; beyond that
# the oldest is judged by the tokens known so far.
MAX_WAITING = 8
# To go a step up takes so many places of that phase, ...
_PLACES_TO_RISE = 500
# ... a lead of more than so many tokens a place, ...
_LEAST_LEAD = 0.02
# ... and claims that are so true.
_MAX_CALIBRATION_ERROR = 0.05
# To go down takes this many of the latest stretches, of at most 300 places together.
_STRETCHES_TO_FALL = 300 // PLACES_OF_STRETCH
# Standard errors by which a lead must be above, or below, the line.  A drafter that serves is
# looked at for as long as it serves, which would bring down any but for a line far off.
_CONFIDENCE = 1.64
_CONFIDENCE_OF_ACTIVE = 4.0


# The lead of one drafter over another: the accepted tokens of a step with it, less the other's.
#
# A step accepts a stretch of the text at once, so of each drafter only those places count at
# which a step with it would have begun (as in `cluster.spec.acceptance`). These differ, so the
# lead is the difference of two ratios, accepted tokens by places. Places of one text resemble
# each other, so the standard error comes from whole stretches of text, as of clusters (Cochran
# 1977, section 6).


# Of the candidate, places and accepted tokens; of the former, places and accepted tokens.
Stretch = tuple[float, ...]
NOTHING: Stretch = (0.0, 0.0, 0.0, 0.0)


def moments(stretch: Stretch) -> Floats:
    """Return what is summed over stretches: the values, and their products."""
    values: Floats = np.array(stretch, dtype=np.float64)
    return np.concatenate((values, np.outer(values, values).ravel()))


def lead_of(sums: Floats) -> tuple[float, float]:
    """Return (the lead in tokens a step, its standard error).  sums: of `moments`."""
    new_places, new_total, old_places, old_total = sums[:4].tolist()
    if not (new_places and old_places):
        return 0.0, math.inf
    new, old = new_total / new_places, old_total / old_places
    # By how much a stretch moves each ratio, to first order.
    slopes: Floats = np.array(
        [-new / new_places, 1.0 / new_places, old / old_places, -1.0 / old_places]
    )
    variance = float(slopes @ sums[4:].reshape(4, 4) @ slopes)
    return new - old, math.sqrt(max(variance, 0.0))


class Trial:
    """Two drafters along one text.  pair: the candidate and the former.  phase: of the rollout when
    it began; its places are evidence of that phase alone.  num_judged: so many of a drafter's best
    nodes, which is also as deep as they may go."""

    num_judged = int(DRAFT_LENGTHS[JUDGED_RANK])

    def __init__(self, pair: tuple[str, str], phase: str) -> None:
        self.pair, self.phase = pair, phase
        # By length of the text before them, the best nodes of each drafter; one that is not there
        # had no draft, or none in time.
        self._places: dict[int, dict[str, TokenTree]] = {}
        self._next_steps = [0, 0]  # the length at which the next step with each would begin
        self._sums = list(NOTHING)
        self._num_places = 0

    def keep(self, drafter: str, proposal: Proposal) -> None:
        """Keep the newest tree of one of them for a place."""
        trees = self._places.setdefault(proposal.base_len, {})
        trees[drafter], _, _ = prune(proposal.tree, proposal.survival, self.num_judged)

    def take_due(self, tokens: TokenLog, *, ends: bool) -> Iterator[tuple[int, Stretch]]:
        """Judge the places whose outcome is known; yield each stretch that is complete, with its
        number of places.  ends: the text is over."""
        while self._places:
            base_len = next(iter(self._places))
            is_known = len(tokens) - base_len >= self.num_judged
            if not (is_known or ends or len(self._places) > MAX_WAITING):
                break
            self._judge(base_len, self._places.pop(base_len), tokens)
            if self._num_places >= PLACES_OF_STRETCH:
                yield self._take()
        if ends and self._num_places:
            yield self._take()

    def _judge(self, base_len: int, trees: Mapping[str, TokenTree], tokens: TokenLog) -> None:
        followed = tokens.since(base_len, base_len + self.num_judged)
        if not len(followed):
            return
        self._num_places += 1
        for index, name in enumerate(self.pair):
            if base_len >= self._next_steps[index]:
                accepted = len(walk(trees.get(name, EMPTY_TREE), followed))
                self._next_steps[index] = base_len + accepted + 1
                self._sums[2 * index] += 1.0
                self._sums[2 * index + 1] += accepted

    def _take(self) -> tuple[int, Stretch]:
        taken = self._num_places, tuple(self._sums)
        self._sums, self._num_places = list(NOTHING), 0
        return taken


class Phase(enum.StrEnum):
    SHADOW = "shadow"
    CANARY = "canary"
    ACTIVE = "active"
    RETIRED = "retired"


class Candidate:
    """A drafter with certain weights that may replace another one, in one of the phases."""

    def __init__(self, name: str, max_faults: int) -> None:
        """max_faults: so many in one phase bring it down."""
        self.name = name
        self.rollout = RolloutConfig("")
        self.changes: Counter[Phase] = Counter()  # of phase, since they were last told
        self._max_faults = max_faults
        self._begin(Phase.SHADOW)

    def _begin(self, phase: Phase) -> None:
        self.phase = phase
        self.num_places, self._sums = 0, moments(NOTHING)
        self._latest: deque[Stretch] = deque(maxlen=_STRETCHES_TO_FALL)
        self._num_faults = 0

    def _move(self, phase: Phase, why: str) -> None:
        former, num_places = self.phase, self.num_places
        self._begin(phase)
        log.log(
            logging.WARNING if phase is Phase.RETIRED else logging.INFO,
            "rollout name=%s replaces=%s phase=%s former=%s places=%d: %s",
            *self.pair,
            phase,
            former,
            num_places,
            why,
        )
        self.changes[phase] += 1

    @property
    def pair(self) -> tuple[str, str]:
        """Its name, and that of the former drafter."""
        return self.name, self.rollout.replaces

    @property
    def lead(self) -> tuple[float, float]:
        """Its lead in tokens a step in this phase, and the standard error."""
        return lead_of(self._sums)

    def enter(self, num_places: int, stretch: Stretch, calibration_error: float) -> None:
        """Enter places of a text; the phase may change."""
        if self.phase is Phase.RETIRED:
            return
        self.num_places += num_places
        self._sums += moments(stretch)
        self._latest.append(stretch)
        mean, error = self.lead
        if (
            self.phase is not Phase.ACTIVE
            and self.num_places >= _PLACES_TO_RISE
            and mean - _CONFIDENCE * error > _LEAST_LEAD
            and calibration_error <= _MAX_CALIBRATION_ERROR
        ):
            self._move(
                Phase.CANARY if self.phase is Phase.SHADOW else Phase.ACTIVE,
                f"it leads by {mean:.3f} tokens a step (standard error {error:.3f})",
            )
        elif self.phase is not Phase.SHADOW and len(self._latest) == _STRETCHES_TO_FALL:
            mean, error = lead_of(sum(map(moments, self._latest), moments(NOTHING)))
            confidence = _CONFIDENCE if self.phase is Phase.CANARY else _CONFIDENCE_OF_ACTIVE
            if mean + confidence * error < 0.0:
                lag = f"it lags by {-mean:.3f} tokens a step (standard error {error:.3f})"
                self._move(Phase.RETIRED, lag)

    def note_faults(self, num_new: int) -> None:
        """Note so many faults more; a canary may fall by them.

        Of one that serves, its breaker has to tell: over days any worker has some."""
        self._num_faults += num_new
        if self.phase is Phase.CANARY and self._num_faults >= self._max_faults:
            self._move(Phase.RETIRED, f"{self._num_faults} faults")

    def export(self) -> dict[str, Any]:
        return {
            "phase": self.phase.value,
            "places": self.num_places,
            "lead": self._sums.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a result of `export`; raises ValueError for another form."""
        sums = moments(NOTHING)
        evidence.restore([state["lead"]], sums)
        self._begin(Phase(state["phase"]))
        self.num_places, self._sums = int(state["places"]), sums
