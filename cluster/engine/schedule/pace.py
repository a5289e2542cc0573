"""How many rows of prompts a step may have, so that nobody waits for long for it.

A chunk of a prompt is bounded in rows by `max_batch_tokens` and in time by `max_chunk_s`: on slow
cores 512 rows take seconds, in which no other text gets a token.  What rows take is measured with
each chunk, for it differs a thousandfold between machines and changes with what else they run.
"""

from __future__ import annotations

from cluster.engine.memory.sequence import Sequence
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
    """Learns from the steps of one engine.

    beside_others: the most rows of prompts in a step in which texts are decoded."""

    def __init__(self, max_rows: int, max_chunk_s: float) -> None:
        """max_rows: of a step.  max_chunk_s: what a step with a chunk of a prompt may take."""
        self._max_rows, self._max_chunk_s = max_rows, max_chunk_s
        self.beside_others = max_rows
        self._factor, self._allowed = 1, max_rows  # of the present step
        self._plain_s = 0.0  # 0 = no step without prompts yet

    def rows(self, waiting: list[Sequence]) -> int:
        """The most rows of prompts in the next step, which is one of these."""
        is_decoding = any(each.pending and len(each.pending.work.delta) <= 1 for each in waiting)
        self._factor = 1 if is_decoding else _ALONE
        self._allowed = min(self._factor * self.beside_others, self._max_rows)
        return self._allowed

    def begin(self, profile: StepProfile | None) -> None:
        """Begin with what steps took before anyone was served; None = that is not known."""
        if profile is not None:
            self._plain_s = float(profile.at([1])[0])
            times_s = profile.at(range(1, self._max_rows + 1))
            self._set((times_s <= self._limit_s).sum())

    def learn(self, step: StepSummary) -> None:
        """Take note of the step that is done."""
        if not step.num_prompt_rows:
            # One with many nodes is no plain one: a chunk of a text that is scored is a tree.
            if step.num_rows > 0 and step.num_nodes <= step.num_sequences:
                weight = _WEIGHT if self._plain_s else 1.0
                self._plain_s += weight * (step.step_time_s - self._plain_s)
            return
        is_in_time = step.step_time_s <= self._factor * self._limit_s
        if is_in_time and 2 * step.num_prompt_rows < self._allowed:
            return  # the end of a prompt tells nothing of a whole chunk
        room_s, took_s = self._limit_s - self._plain_s, step.step_time_s - self._plain_s
        fitting = step.num_prompt_rows * room_s / max(took_s, 1e-9)
        self._set(min(max(fitting, _SHRINKAGE * self.beside_others), _GROWTH * self.beside_others))

    @property
    def _limit_s(self) -> float:
        return max(self._max_chunk_s, _PLAIN_STEPS * self._plain_s)

    def _set(self, rows: float) -> None:
        self.beside_others = min(max(int(rows), _LEAST_ROWS), self._max_rows)
