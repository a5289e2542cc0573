"""The task class of a text whose request named none, inferred from whose drafts are right in it.

For each class and drafter a histogram says how many of a tree's best nodes the texts of that class
accept; it is made of the texts whose requests named it.  A text without a class has a posterior
over the classes, and belongs to one once that leaves little doubt.  What all texts without a class
accept is one hypothesis more: a text that is like none of the classes stays without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config.schema import Config
from cluster.core import DEFAULT_TASK
from cluster.plan.guess import Guess
from cluster.plan.texts import Text
from cluster.spec import evidence
from cluster.spec.acceptance import law_name

# Histograms are over the accepted of so many of a tree's best nodes (`AcceptanceModel.learn_all`).
NUM_JUDGED = 4
# From so many trees on a histogram is halved, so that it follows a drafter that learns.
_MAX_TREES = 4000.0


class _Histogram:
    """Counts of trees by their accepted nodes, each with one beforehand."""

    def __init__(self, counts: Sequence[float] = (1.0,) * (NUM_JUDGED + 1)) -> None:
        self.counts = [float(each) for each in counts]
        self.total = sum(self.counts)

    @property
    def num_trees(self) -> float:
        return self.total - len(self.counts)

    def add(self, accepted: int) -> None:
        if self.total >= _MAX_TREES:
            self.counts = [0.5 * (1.0 + each) for each in self.counts]
            self.total = sum(self.counts)
        self.counts[accepted] += 1.0
        self.total += 1.0

    def log_share(self, accepted: int) -> float:
        return math.log(self.counts[accepted] / self.total)


class TaskInference:
    """The histograms of one process, which sees the trees of some drafters."""

    def __init__(self, classes: Sequence[str]) -> None:
        """classes: names of the classes that there are, without the one for all other texts."""
        self.classes = tuple(name for name in classes if name != DEFAULT_TASK)
        # By what else tells texts apart (adapter, law), and by drafter and class.
        self._histograms: dict[str, dict[str, dict[str, _Histogram]]] = {}

    @classmethod
    def of(cls, config: Config) -> TaskInference | None:
        """Return what infers the classes of a configuration; None if that is not wanted."""
        return cls([*config.tasks]) if config.infer_tasks else None

    def learn(self, text: Text, drafter: str, accepted: int) -> bool:
        """Enter a tree of a text, of whose best nodes so many were right.

        Returns True if a text without a class belongs to another one now; its group is then that
        one's."""
        name, is_sampled = text.group
        task, at, adapter = name.partition("@")
        if text.guess is None and task not in self.classes:
            text.guess = Guess()
        others = f"{at}{adapter}|{law_name(is_sampled=is_sampled)}"
        of_drafter = self._histograms.setdefault(others, {}).setdefault(drafter, {})
        named = task if text.guess is None else DEFAULT_TASK
        of_drafter.setdefault(named, _Histogram()).add(accepted)
        if text.guess is None or not self._weigh(text.guess, of_drafter, accepted):
            return False
        text.group = f"{text.guess.task}{at}{adapter}", is_sampled
        return True

    def _weigh(self, guess: Guess, of_drafter: Mapping[str, _Histogram], accepted: int) -> bool:
        """Enter a tree of a text without a class; True if it belongs to another one now."""
        guess.num_trees += 1
        told = {
            name: each.log_share(accepted)
            for name, each in of_drafter.items() if each.num_trees >= evidence.FEW
        }  # fmt: skip
        if told:
            # Of a class in which this drafter is unknown its trees say nothing.
            mean = sum(told.values()) / len(told)
            for name in (*self.classes, DEFAULT_TASK):
                guess.log_probs[name] = guess.log_probs.get(name, 0.0) + told.get(name, mean)
        if guess.num_trees < evidence.FEW or not guess.log_probs:
            return False
        former, guess.task = guess.task, guess.best()
        return guess.task != former

    def export(self) -> list[Any]:
        """Return the histograms as plain values."""
        return [
            [others, drafter, task, each.counts]
            for others, of_all in self._histograms.items()
            for drafter, of_drafter in of_all.items()
            for task, each in of_drafter.items()
        ]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from a result of `export`; raises ValueError for another form."""
        for others, drafter, task, counts in state:
            if len(counts) != NUM_JUDGED + 1 or not all(0.0 < each < math.inf for each in counts):
                raise ValueError("a histogram of another form")
            of_drafter = self._histograms.setdefault(str(others), {}).setdefault(str(drafter), {})
            of_drafter[str(task)] = _Histogram(counts)
