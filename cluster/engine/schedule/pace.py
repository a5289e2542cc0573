"""How many rows of prompts a step may have, so that nobody waits for long for it.

A chunk of a prompt is bounded in rows by `max_batch_tokens` and in time by `max_chunk_s`: on slow
cores 512 rows take seconds, in which no other text gets a token.  What rows take is measured with
each chunk, for it differs a thousandfold between machines and changes with what else they run.
"""

from __future__ import annotations

from cluster.engine.work import StepSummary
from cluster.spec.step_profile import StepProfile

# A step with a chunk may take so many times as long as one without, however long that is: else the
# rows that the weights are read for anyway would be too few for a prompt to get on.
_PLAIN_STEPS = 2.0
# Where no text decodes beside them, prompts may take so many times as long: a new text waits for
# that once, and larger chunks read the weights less often.
_ALONE = 4
# From one chunk to the next the rows grow and shrink by no more than these: a step that a machine
# was stopped in is made good by a few chunks.
_GROWTH, _SHRINKAGE = 2.0, 1 / 32
# Fewer rows than these save no time on any processor: the weights are read for them all at once.
_LEAST_ROWS = 4
# Weight of the newest step in the running mean of those without prompts.
_WEIGHT = 0.1


class PromptPace:
    """Learns from the steps of one engine."""

    def __init__(self, max_rows: int, max_chunk_s: float) -> None:
        """max_rows: of a step.  max_chunk_s: what a step with a chunk of a prompt may take."""
        self._max_rows, self._max_chunk_s = max_rows, max_chunk_s
        self._rows = float(max_rows)  # beside texts in decoding
        self._plain_s = 0.0  # 0 = no step without prompts yet

    def rows(self, *, beside_others: bool) -> int:
        """The most rows of prompts in the next step.  beside_others: texts are decoded in it."""
        rows = self._rows if beside_others else _ALONE * self._rows
        return min(int(rows), self._max_rows)

    def begin(self, profile: StepProfile) -> None:
        """Begin with what steps took before anyone was served."""
        self._plain_s = float(profile.at([1])[0])
        rows = range(1, self._max_rows + 1)
        self._set(float((profile.at(rows) <= self._limit_s).sum()))

    def learn(self, step: StepSummary, *, beside_others: bool) -> None:
        """Take note of a step that is done, and that had rows."""
        if not step.num_prompt_rows:
            # One with many nodes is no plain one: a chunk of a text that is scored is a tree.
            if step.num_nodes <= step.num_sequences:
                weight = _WEIGHT if self._plain_s else 1.0
                self._plain_s += weight * (step.step_time_s - self._plain_s)
            return
        rows = self._rows if beside_others else _ALONE * self._rows
        is_late = step.step_time_s > self._limit_s * (1 if beside_others else _ALONE)
        if not is_late and 2 * step.num_prompt_rows < min(rows, self._max_rows):
            return  # the end of a prompt tells nothing of a whole chunk
        took_s = max(step.step_time_s - self._plain_s, 1e-9)
        fitting = step.num_prompt_rows * (self._limit_s - self._plain_s) / took_s
        self._set(min(max(fitting, _SHRINKAGE * self._rows), _GROWTH * self._rows))

    @property
    def _limit_s(self) -> float:
        return max(self._max_chunk_s, _PLAIN_STEPS * self._plain_s)

    def _set(self, rows: float) -> None:
        self._rows = min(max(rows, _LEAST_ROWS), float(self._max_rows))
