"""Scores drafts: every held tree is compared with the text that followed it.

The law of acceptance makes this possible for every tree, verified or not: its nodes on the text are
those that would have been accepted.  So a drafter can be scored without verifying its drafts, even
one that is never verified (a shadow).  Scores are kept apart by drafter, task and law.

The expected gain of a step with a drafter's best m nodes is the mean over the places where such a
step would have begun.  The mean over all places would be too great: where a text is copied, long
trees are right at many places in a row, but one step accepts such a whole stretch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cluster.core import SamplingParams
from cluster.spec import evidence
from cluster.spec.native import trees as native
from cluster.spec.native.trees import Fate
from cluster.spec.step_profile import DRAFT_LENGTHS
from cluster.spec.survival import Calibrator

Group = tuple[str, bool]  # task class; sampled, or greedy


def group_of(params: SamplingParams, task: str, adapter: str) -> Group:
    """Return the group of a request; its task class is named with its adapter and its law."""
    name = f"{task}@{adapter}" if adapter else task
    return (name if params.is_coupled else f"{name}/{params.law}"), params.temperature > 0.0


# Half-life of a score, in trees: drafters learn, and clients' requests change.
TREE_DECAY = 0.5 ** (1.0 / 1000.0)
# A drafter is judged by so many of its best nodes, as an index of DRAFT_LENGTHS.  In a merge its
# weight depends on their acceptance ...
JUDGED_RANK = 3
# ... and is at least this, so that calibration alone decides about the nodes of a poor drafter.
LEAST_WEIGHT = 0.05
# Limit for scores, because clients name tasks and models change; the oldest task's is dropped.
_MAX_SCORES = 1024
# Between a drafter's name and its model's hash, and the digits of that.
_WITH = "@"
_SHOWN = 12


class Score:
    """The acceptance of one drafter's trees in one group.

    addresses: of the arrays that native code reads and writes in place."""

    def __init__(self) -> None:
        self.calibrator = Calibrator()
        # First the number of trees.  Then, by number of best nodes: the places where a step would
        # have begun, the accepted nodes, and their squares.
        self.sums = np.zeros(1 + 3 * len(DRAFT_LENGTHS))
        self._by_length = self.sums[1:].reshape(3, len(DRAFT_LENGTHS))
        arrays = self.sums, self.calibrator.sums, self.calibrator.curve
        self.addresses = [each.ctypes.data for each in arrays]

    @property
    def num_trees(self) -> float:
        """Effective number of trees: forgotten ones do not count."""
        return float(self.sums[0])

    def expected(self, rank_index: int) -> tuple[float, float]:
        """(accepted tokens of the best DRAFT_LENGTHS[rank_index] nodes, standard error)."""
        count, total, squares = self._by_length[:, rank_index].tolist()
        if count < 1.0:
            return 0.0, math.inf
        mean = total / count
        return mean, math.sqrt(max(squares / count - mean**2, 0.0) / count)

    def accepted_of_few(self) -> float:
        """Mean number of accepted tokens among a tree's best few nodes."""
        return self.expected(JUDGED_RANK)[0]

    def weight(self) -> float:
        """The weight of this drafter in a merge: the tokens that its best nodes bring."""
        count, total, _ = self._by_length[:, JUDGED_RANK].tolist()
        # A few trees do not move it by much.
        return float((total + evidence.FEW * 0.5) / (count + evidence.FEW)) + LEAST_WEIGHT

    def export(self) -> dict[str, Any]:
        return {
            "sums": self.sums.tolist(),
            "calibrator": self.calibrator.export(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `export`; raises ValueError if it has another form."""
        self.calibrator.restore(state["calibrator"])
        evidence.restore([state["sums"]], self.sums)


class AcceptanceModel:
    """Scores by drafter and group; of a drafter with a model by the model's hash too, so that
    another model begins anew and one that comes back goes on with its own."""

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}  # the drafters' names with their models' hashes
        # By these, the task, None = all of them, and whether texts are sampled.
        self._scores: dict[tuple[str, str | None, bool], Score] = {}

    def meet(self, drafter: str, model_hash: str) -> bool:
        """Score a drafter by this model from now on, "" = it has none; True if that is another."""
        former = self._version(drafter)
        self._versions[drafter] = (
            f"{drafter}{_WITH}{model_hash[:_SHOWN]}" if model_hash else drafter
        )
        return former != self._version(drafter)

    def _version(self, drafter: str) -> str:
        return self._versions.get(drafter, drafter)

    def known(self, drafter: str, group: Group) -> Score:
        """Return the score to use: that of the group, or that of all tasks while it is new."""
        own = self.score(drafter, group)
        return own if own.num_trees >= evidence.FEW else self.score(drafter, (None, group[1]))

    def score(self, drafter: str, group: tuple[str | None, bool]) -> Score:
        """group: with task None, that of all tasks."""
        return self._score((self._version(drafter), *group))

    def _score(self, key: tuple[str, str | None, bool]) -> Score:
        found = self._scores.get(key)
        if found is None:
            if len(self._scores) >= _MAX_SCORES:
                del self._scores[min(self._scores, key=lambda each: each[1] is None)]
            found = self._scores[key] = Score()
        return found

    def learn(self, fates: Sequence[Fate]) -> list[int]:
        """Enter trees whose outcome is known, each into the score of its group and into that of all
        tasks.

        Returns the accepted among each tree's best few nodes, or -1 where no step with them would
        have begun or no text has followed."""
        known = [fate for fate in fates if len(fate.followed)]
        if not known:
            return [-1] * len(fates)
        scores: list[Score] = []
        for fate in known:
            drafter, group = fate.seen.drafter, fate.seen.group
            scores += self.score(drafter, group), self.score(drafter, (None, group[1]))
        found = iter(
            native.score_trees(
                known, [score.addresses for score in scores], JUDGED_RANK, TREE_DECAY
            )
        )
        for score in scores:
            score.calibrator.fit_if_due()
        return [next(found) if len(fate.followed) else -1 for fate in fates]

    def calibration_error(self, drafter: str) -> float:
        """Return the greatest error of its calibration over all tasks, of its laws."""
        scores = [self.score(drafter, (None, is_sampled)) for is_sampled in (False, True)]
        known = [each for each in scores if each.num_trees >= evidence.FEW]
        return max((each.calibrator.expected_error() for each in known), default=0.0)

    def __iter__(self) -> Iterator[tuple[str, Group, Score]]:
        """The scores of the drafters as they are now."""
        for (version, task, is_sampled), score in self._scores.items():
            drafter = version.partition(_WITH)[0]
            if task is not None and version == self._version(drafter):
                yield drafter, (task, is_sampled), score

    def table(self) -> list[dict[str, object]]:
        """Every score as a plain record, for status reports: JSON has no infinite numbers."""
        return [
            {
                "drafter": drafter,
                "version": self._version(drafter),
                "task": task,
                "law": law_name(is_sampled=is_sampled),
                "trees": score.num_trees,
                "accepted": {
                    str(rank): score.expected(index)[0] for index, rank in enumerate(DRAFT_LENGTHS)
                },
                "error": finite(score.expected(JUDGED_RANK)[1]),
                "calibration_error": score.calibrator.expected_error(),
            }
            for drafter, (task, is_sampled), score in self
            if score.num_trees
        ]

    def export(self) -> list[Any]:
        """Return the scores as plain values; task None stands for all tasks."""
        return [[*key, score.export()] for key, score in self._scores.items()]

    def restore(self, state: Sequence[Any]) -> None:
        for version, task, is_sampled, score in state:
            task = None if task is None else str(task)
            self._score((str(version), task, bool(is_sampled))).restore(score)


def finite(value: float) -> float | None:
    """The value, or None where too little is known for one."""
    return value if math.isfinite(value) else None


def law_name(*, is_sampled: bool) -> str:
    return "sampled" if is_sampled else "greedy"
