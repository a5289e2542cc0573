"""Beam search over one prompt, without a model: candidates in, beams and finished texts out.

Every step equals that of transformers' `generate(num_beams=..., do_sample=False)`, in the same
single precision.  A candidate is a beam and its next token.  A step considers its best
`num_candidates` candidates: the best `num_beams` of those that do not end go on, and those that end
become texts if they are among the best `num_beams` of all.  Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.core import FloatArray, TokenArray, TokenLogprob
from cluster.records import record
from cluster.requests.fields import BeamSpec


@record
class Beam:
    """An unfinished text: the beam that it continues, and its last token.

    parent: None if the token follows the prompt.  logprob: of the whole text, float32.
    row: the row of the step's candidates that it was taken from.  chosen: the last token's own
    log-probability and its alternatives, None if not requested.
    """

    token_id: int
    logprob: np.float32
    row: int
    parent: Beam | None = None
    chosen: TokenLogprob | None = None

    def lineage(self) -> list[Beam]:
        """Return the beams from the first token's to this one."""
        found: list[Beam] = []
        beam: Beam | None = self
        while beam is not None:
            found.append(beam)
            beam = beam.parent
        return found[::-1]


@record
class Hypothesis:
    """A finished text.

    beam: its last token, which may be a stop token.  score: orders the texts.
    is_stopped: it ends with a stop token, not at the limit of tokens.
    """

    beam: Beam
    score: np.float32
    is_stopped: bool


class BeamSearch:
    """The beams of one prompt.  Submit candidates to `advance` until `is_done`.

    hypotheses: the finished texts, the best first, num_beams at most.
    """

    def __init__(
        self,
        spec: BeamSpec,
        max_tokens: int,
        stop_token_ids: Sequence[int] = (),
        num_logprobs: int | None = None,
    ) -> None:
        """max_tokens: at least 1.  num_logprobs: alternatives that `Beam.chosen` keeps, None = it
        is not kept."""
        self._spec = spec
        self._max_tokens = max_tokens
        self._stops = frozenset(stop_token_ids)
        self._num_logprobs = num_logprobs
        self._length = 0
        self.is_done = False
        self.hypotheses: list[Hypothesis] = []
        # The beams that the next candidates continue, the best first; empty before the first step.
        self.beams: list[Beam] = []

    @property
    def num_candidates(self) -> int:
        """Number of a row's most probable tokens that can matter, stop tokens included."""
        return max(2, 1 + len(self._stops)) * self._spec.num_beams

    def advance(self, token_ids: TokenArray, logprobs: FloatArray) -> None:
        """Make one step.

        token_ids: int32[rows, k], logprobs: float32[rows, k]: the k most probable next tokens after
        each of `beams` (the prompt in the first step), the most probable first;
        k = num_candidates, or the vocabulary where that is smaller.
        """
        assert not self.is_done, "the search is over"
        assert len(token_ids) == max(1, len(self.beams)), "one row for each beam"
        self._length += 1
        is_last = self._length == self._max_tokens
        num_beams = self._spec.num_beams
        running: list[Beam] = []
        ended: list[Hypothesis] = []
        divisor = self._length**self._spec.length_penalty
        for rank, beam in enumerate(self._best(token_ids, logprobs)):
            is_stopped = beam.token_id in self._stops
            if not (is_stopped or is_last):
                running.append(beam)
            elif rank < num_beams:
                ended.append(Hypothesis(beam, np.float32(beam.logprob / divisor), is_stopped))
        # Among equal scores the one that was found first stays.
        ranked = sorted([*self.hypotheses, *ended], key=lambda one: one.score, reverse=True)
        self.hypotheses = ranked[:num_beams]
        self.beams = running[:num_beams]
        self.is_done = is_last or not self.beams or not self._can_improve()

    def _best(self, token_ids: TokenArray, logprobs: FloatArray) -> list[Beam]:
        """The step's best candidates of all beams, the best first."""
        totals = logprobs.astype(np.float32)
        if self.beams:
            totals += np.array([beam.logprob for beam in self.beams], dtype=np.float32)[:, None]
        num_columns = totals.shape[1]
        order = np.argsort(-totals, axis=None, kind="stable")[: self.num_candidates]
        found: list[Beam] = []
        for row, column in zip(*divmod(order, num_columns), strict=True):
            parent = self.beams[row] if self.beams else None
            chosen = self._chosen(token_ids[row], logprobs[row], int(column))
            found.append(
                Beam(int(token_ids[row, column]), totals[row, column], int(row), parent, chosen)
            )
        return found

    def _chosen(
        self, token_ids: TokenArray, logprobs: FloatArray, column: int
    ) -> TokenLogprob | None:
        if self._num_logprobs is None:
            return None
        count = self._num_logprobs
        top = zip(token_ids[:count].tolist(), logprobs[:count].tolist(), strict=True)
        return TokenLogprob(float(logprobs[column]), tuple(top))

    def _can_improve(self) -> bool:
        """True if an unfinished text may still become one of the best finished ones."""
        if len(self.hypotheses) < self._spec.num_beams:
            return True
        if self._spec.early_stopping is True:
            return False
        power = self._spec.length_penalty
        # Longer texts have better scores where the power is positive: the longest is the best hope.
        hopes_for_longest = self._spec.early_stopping == "never" and power > 0.0
        length = self._max_tokens if hopes_for_longest else self._length
        hoped = np.float32(self.beams[0].logprob / length**power)
        return bool(hoped > self.hypotheses[-1].score)
