"""One batch under way at a target, or two by turns: what its measured steps say.

While a batch is computed nothing else happens at the target, and between two batches of the same
sequences it waits for the coordinator: for R rows a round takes T(R) + o, o = planning and the way
there and back.  Two cohorts by turns hide o, and the drafters of each have a whole step of the
other's to draft in; but every weight is read twice:

    one cohort   R rows in T(R) + o
    two cohorts  R rows in max(2 T(R/2), T(R/2) + o)

While steps are memory-bound T(R/2) is nearly T(R), and one cohort is faster; once they are
compute-bound T(R/2) is nearly half of it, and two are.
"""

from __future__ import annotations

from cluster.spec import evidence
from cluster.spec.step_profile import StepProfile

# Two must be faster by so much before they are taken, and are given up where they are not at all.
_HYSTERESIS = 1.03
# So many rounds are looked at before the first decision, and after each.
_SETTLE_ROUNDS = 32


class CohortChoice:
    """Decides, round by round, into how many cohorts a target's sequences are divided.

    profile: T by rows, of which the shape counts; None = not measured, which leaves it at one.
    """

    def __init__(self, profile: StepProfile | None) -> None:
        self._profile = profile
        self._rows = 0.0
        self._scale = 0.0
        self._outside_s = 0.0
        self._num_rounds = 0
        self.num_cohorts = 1

    def record(
        self, num_sequences: int, num_nodes: int, step_time_s: float, outside_s: float
    ) -> None:
        """A batch's step took so long, and outside_s went by for it while its target might have
        had nothing to do: 0 where that time is computing on the target's own device, which no
        order of batches can hide."""
        rows = num_sequences + num_nodes
        if self._profile is None or rows < 1:
            return
        weight = evidence.RECENT if self._num_rounds else 1.0
        self._rows += weight * (rows - self._rows)
        self._scale += weight * (step_time_s / float(self._profile.at([rows])[0]) - self._scale)
        self._outside_s += weight * (outside_s - self._outside_s)
        self._num_rounds += 1
        if self._num_rounds % _SETTLE_ROUNDS == 0:
            self.num_cohorts = self._best()

    def _best(self) -> int:
        assert self._profile is not None
        half = self._rows if self.num_cohorts == 2 else self._rows / 2.0
        whole_s, half_s = (self._scale * self._profile.at([2.0 * half, half])).tolist()
        one_s = whole_s + self._outside_s
        two_s = max(2.0 * half_s, half_s + self._outside_s)
        bar = 1.0 if self.num_cohorts == 2 else _HYSTERESIS
        return 2 if two_s * bar < one_s else 1
