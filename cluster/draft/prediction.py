"""Prediction: drafts along the output that the client expects, and finds its place after an edit.

A client that has a file changed knows most of the answer: the file as it was.  The output follows
it, leaves it where something is inserted, deleted or replaced, and comes back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

from cluster.config.parse import PositiveInt, Share
from cluster.draft.base import DrafterContext
from cluster.draft.count_drafter import CountDrafter, CountState
from cluster.draft.indexed_text import (
    LONGEST_MATCH,
    SEPARATOR,
    Match,
    agreement,
)
from cluster.draft.lookups import CountedText
from cluster.draft.native import lookups as native
from cluster.records import frozen

# An output that agrees on so many tokens with another place has left the one it was at.
_SURE = 4
# How sure the first predicted token is, before there is any output: as if so many had been right.
_EVIDENCE_AT_START = 4


@frozen
class PredictionOptions:
    """Copies of the output that the client predicts."""

    max_places: PositiveInt = 4
    """Places in the predicted text that are continued at once, where it is unclear at which of them
    the output is."""
    min_survival: Share = 0.02
    """Less likely nodes are left out."""


class Predicted:
    """The prediction of one request, and where in it the output has got to; a `Source`.

    native/predicted.cpp does the same.
    """

    def __init__(self, token_ids: Sequence[int], max_places: int) -> None:
        self._tokens = [*token_ids, SEPARATOR]
        self._max_places = max_places
        self._next = 0  # index of the token that the output is at
        self._read_len = 0  # tokens of the text that it is after
        self._num_cuts = 0  # of the text, when it was read

    def root(self, text: CountedText, position: int) -> Match:
        """The places where the output may be; moves to the best of them where that is sure."""
        self._read(text, position)
        output = text.tokens[len(text.tokens) - min(position, LONGEST_MATCH) :]
        if not output:
            return Match([(self._tokens, 0)], [1.0], _EVIDENCE_AT_START)
        here = agreement(output, self._tokens, self._next)
        if here >= _SURE:
            return Match([(self._tokens, self._next)], [1.0], here)
        # Where nothing agrees, something was inserted before the next token, or has replaced it.
        lengths = {self._next: here}
        if here == 0 and self._next + 1 < len(self._tokens):
            lengths[self._next + 1] = 0
        lengths.update(self._agreeing(output))
        # A place farther away must agree on more: short words stand everywhere.
        scores = {
            index: length - 0.5 * log2(1 + self._distance(index))
            for index, length in lengths.items()
        }
        places = sorted(scores, key=lambda index: (-scores[index], self._distance(index)))
        places = places[: self._max_places]
        best = places[0]
        if lengths[best] >= _SURE:
            self._next = best
        weights = [2.0 ** (scores[index] - scores[best]) for index in places]
        return Match([(self._tokens, index) for index in places], weights, max(lengths[best], 1))

    def _read(self, text: CountedText, position: int) -> None:
        """Follow the output up to the end of the text; from its beginning after a cut."""
        start = max(len(text.tokens) - position, self._read_len)
        if text.num_cuts != self._num_cuts:
            self._next, start = 0, len(text.tokens) - position
        for token in text.tokens[start:]:
            self._next += self._tokens[self._next] == token
        self._read_len, self._num_cuts = len(text.tokens), text.num_cuts

    def _distance(self, index: int) -> int:
        return abs(index - self._next)

    def _agreeing(self, output: Sequence[int]) -> dict[int, int]:
        """The places that agree with the end of the output: those that agree longest, and for
        every shorter length those nearest to where the output was.  Place -> length."""
        places = [at + 1 for at, token in enumerate(self._tokens) if token == output[-1]]
        found: dict[int, int] = {}
        for length in range(1, len(output) + 1):
            places = [at for at in places if agreement(output, self._tokens, at) >= length]
            found.update(dict.fromkeys(sorted(places, key=self._distance)[:2], length))
        return found


@dataclass(slots=True, eq=False)
class PredictionState(CountState):
    """source: None for a request without a prediction."""

    source: Any = None


class PredictionDrafter(CountDrafter[PredictionState]):
    """Continues the request's own prediction; drafts nothing for requests without one."""

    def __init__(self, context: DrafterContext, options: PredictionOptions) -> None:
        ways, self._predicted = native.fastest(Predicted, native.Predicted)
        super().__init__(context, options.min_survival, PredictionState.opened_by, ways)
        self._max_places = options.max_places

    def _forget_tree(self, state: PredictionState) -> None:
        super()._forget_tree(state)
        predicted = state.params.prediction
        state.source = self._predicted(predicted, self._max_places) if predicted else None

    def _source(self, state: PredictionState) -> Any:
        return state.source
