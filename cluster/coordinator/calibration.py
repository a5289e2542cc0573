"""What each drafter's claims are worth, learned apart for each task and law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster import metrics
from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.session import Group
from cluster.core import TokenArray
from cluster.metrics import Recorder
from cluster.spec.forest import join
from cluster.spec.survival import Calibrator, claimed_conditionals, revealed

_MAX_CALIBRATORS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A verified item of a request of that group, and the path that was accepted."""

    group: Group
    in_flight: InFlight
    path: TokenArray


class CalibrationBook:
    """Calibrators by drafter and group."""

    def __init__(self) -> None:
        self._calibrators: dict[tuple[str, Group], Calibrator] = {}
        self._exported: set[tuple[str, Group]] = set()  # those with a gauge

    def calibrator(self, drafter: str, group: Group) -> Calibrator:
        """That of the drafter's claims for requests of that group."""
        key = (drafter, group)
        calibrator = self._calibrators.get(key)
        if calibrator is None:
            if len(self._calibrators) >= _MAX_CALIBRATORS:
                # Tasks are named by clients; the oldest one makes room.
                del self._calibrators[next(iter(self._calibrators))]
            calibrator = self._calibrators[key] = Calibrator()
        return calibrator

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Calibrate the drafters' claims by what the target accepted of their own nodes."""
        alike: dict[tuple[tuple[str, ...], Group], list[Lesson]] = {}
        for lesson in lessons:
            if lesson.in_flight.drafters:
                key = (lesson.in_flight.drafters, lesson.group)
                alike.setdefault(key, []).append(lesson)
        for (drafters, group), members in alike.items():
            forest = join([lesson.in_flight.tree for lesson in members])
            starts = forest.starts.tolist()
            path = np.concatenate(
                [lesson.path + start for lesson, start in zip(members, starts, strict=False)]
            )
            nodes, accepted = revealed(forest.parents, path)
            for index, drafter in enumerate(drafters):
                claimed = np.concatenate([lesson.in_flight.claimed[index] for lesson in members])
                # A drafter's own nodes are closed under parents: NaN stands for no parent of any.
                own = ~np.isnan(claimed[nodes])
                conditionals = claimed_conditionals(forest.parents, claimed)[nodes[own]]
                self.calibrator(drafter, group).observe(conditionals, accepted[own])

    def record(self, recorder: Recorder) -> None:
        """Export how right each drafter's survivals were; not on the way of a round."""
        for key in self._exported - self._calibrators.keys():
            recorder.forget(metrics.CALIBRATION_ERROR, **_labels(*key))
        self._exported &= self._calibrators.keys()
        for key, calibrator in self._calibrators.items():
            if calibrator.num_observed:
                self._exported.add(key)
                error = calibrator.expected_error()
                recorder.set(metrics.CALIBRATION_ERROR, error, **_labels(*key))


def _labels(drafter: str, group: Group) -> dict[str, str]:
    task, is_sampled = group
    return {"drafter": drafter, "task": task, "law": "sampled" if is_sampled else "greedy"}
