"""What is known of the task class of one text whose request named none."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cluster.core import DEFAULT_TASK

# A text belongs to a class from this posterior on.
_LEAST_POSTERIOR = 0.9


@dataclass(slots=True, eq=False)
class Guess:
    """What is known of a text without a class.

    log_probs: of the classes, up to a constant.  num_trees: that were judged of it.  task: the
    class that it belongs to at present.
    """

    log_probs: dict[str, float] = field(default_factory=dict)
    num_trees: int = 0
    task: str = DEFAULT_TASK

    def best(self) -> str:
        """Return the class that leaves little doubt, or the present one.

        All classes are as likely beforehand.  A text that resembles those without a class more than
        those of the likeliest one is of none."""
        classes = {task: each for task, each in self.log_probs.items() if task != DEFAULT_TASK}
        best = max(classes, key=lambda task: classes[task])
        most, none = classes[best], self.log_probs[DEFAULT_TASK]
        if sum(math.exp(each - most) for each in classes.values()) >= 1.0 / _LEAST_POSTERIOR:
            return self.task
        return best if most >= none else DEFAULT_TASK
