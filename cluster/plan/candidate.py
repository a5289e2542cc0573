"""A drafter in a rollout: the phase that it has come to, and the evidence that moves it on."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from typing import Any

from cluster.config.rollout import RolloutConfig
from cluster.plan.lead import Lead, Stretch
from cluster.plan.trials import PLACES_OF_STRETCH

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

    def __init__(self, name: str, max_faults: int) -> None:
        """max_faults: so many in one phase bring it down."""
        self.name = name
        self.rollout = RolloutConfig("")
        self._max_faults = max_faults
        self._begin(Phase.SHADOW)

    def _begin(self, phase: Phase) -> None:
        self.phase = phase
        self.num_places, self._lead = 0, Lead()
        self._latest: deque[Stretch] = deque(maxlen=_STRETCHES_TO_FALL)
        self._num_faults = 0

    @property
    def lead(self) -> tuple[float, float]:
        """Its lead in tokens a step in this phase, and the standard error."""
        return self._lead.estimate()

    def enter(self, num_places: int, stretch: Stretch, calibration_error: float) -> str:
        """Enter places of a text; returns why the phase has changed, "" = it has not."""
        if self.phase is Phase.RETIRED:
            return ""
        self.num_places += num_places
        self._lead.add(stretch)
        self._latest.append(stretch)
        return self._rise(calibration_error) or self._fall()

    def note_faults(self, num_new: int) -> str:
        """Note so many faults more; returns as `enter`.

        Of one that serves, its breaker has to tell: over days any worker has some."""
        self._num_faults += num_new
        num_faults = self._num_faults
        if self.phase is not Phase.CANARY or num_faults < self._max_faults:
            return ""
        self._begin(Phase.RETIRED)
        return f"{num_faults} faults"

    def _rise(self, calibration_error: float) -> str:
        mean, error = self.lead
        if (
            self.phase is Phase.ACTIVE
            or self.num_places < _PLACES_TO_RISE
            or mean - _CONFIDENCE * error <= _LEAST_LEAD
            or calibration_error > _MAX_CALIBRATION_ERROR
        ):
            return ""
        self._begin(Phase.CANARY if self.phase is Phase.SHADOW else Phase.ACTIVE)
        return f"it leads by {mean:.3f} tokens a step (standard error {error:.3f})"

    def _fall(self) -> str:
        if self.phase is Phase.SHADOW or len(self._latest) < _STRETCHES_TO_FALL:
            return ""
        mean, error = Lead(self._latest).estimate()
        confidence = _CONFIDENCE if self.phase is Phase.CANARY else _CONFIDENCE_OF_ACTIVE
        if mean + confidence * error >= 0.0:
            return ""
        self._begin(Phase.RETIRED)
        return f"it lags by {-mean:.3f} tokens a step (standard error {error:.3f})"

    def export(self) -> dict[str, Any]:
        return {
            "phase": self.phase.value,
            "places": self.num_places,
            "lead": self._lead.export(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a result of `export`; raises ValueError for another form."""
        lead = Lead()
        lead.restore(state["lead"])
        self._begin(Phase(state["phase"]))
        self.num_places, self._lead = int(state["places"]), lead
