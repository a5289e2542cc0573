"""A drafter in a rollout: the phase that it has come to, and the evidence that moves it on."""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cluster.config.rollout import RolloutConfig
from cluster.plan.lead import SIZE, Stretch, lead_of, moments
from cluster.plan.trials import PLACES_OF_STRETCH
from cluster.spec import evidence

log = logging.getLogger(__name__)

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


class Phase(enum.StrEnum):
    SHADOW = "shadow"
    CANARY = "canary"
    ACTIVE = "active"
    RETIRED = "retired"


class Candidate:
    """A drafter with certain weights that may replace another one, in one of the phases."""

    def __init__(
        self, name: str, max_faults: int, changed: Callable[[Candidate], None] = lambda _: None
    ) -> None:
        """max_faults: so many in one phase bring it down.  changed: is told of a new phase."""
        self.name = name
        self.rollout = RolloutConfig("")
        self._max_faults, self._changed = max_faults, changed
        self._begin(Phase.SHADOW)

    def _begin(self, phase: Phase) -> None:
        self.phase = phase
        self.num_places, self._sums = 0, np.zeros(SIZE)
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
        self._changed(self)

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
            mean, error = lead_of(sum(map(moments, self._latest), np.zeros(SIZE)))
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
        sums = np.zeros(SIZE)
        evidence.restore([state["lead"]], sums)
        self._begin(Phase(state["phase"]))
        self.num_places, self._sums = int(state["places"]), sums
