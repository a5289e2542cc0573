"""Prediction: drafts along the output that the client expects, and finds its place after an edit.

A client that has a file changed knows most of the answer: the file as it was.  The output follows
it, leaves it where something is inserted, deleted or replaced, and comes back to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cluster.core import EMPTY_TOKENS, TokenArray, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.count_drafter import CountDrafter, CountState
from cluster.draft.count_tree import Continuations
from cluster.draft.gram_index import LONGEST_MATCH, SEPARATOR, Match, check_at_least

# An output that agrees on so many tokens with another place has left the one it was at.
_SURE = 4
# How sure the first predicted token is, before there is any output: as if so many had been right.
_EVIDENCE_AT_START = 4


@dataclass(frozen=True, slots=True)
class PredictionOptions:
    """max_places: places in the predicted text that are continued at once, where it is unclear at
    which of them the output is.  min_survival: nodes with a lower survival are left out.
    """

    max_places: int = 4
    min_survival: float = 0.02

    def __post_init__(self) -> None:
        check_at_least(1, max_places=self.max_places)


@dataclass(slots=True, eq=False)
class PredictionState(CountState):
    """One request.

    predicted: int32[n + 1], the prediction with a separator behind it.  next_index: where the
    output has got to in it.  read_len: tokens of the text that next_index is after.
    """

    predicted: TokenArray = field(default_factory=lambda: EMPTY_TOKENS)
    source: tuple[int, ...] = ()
    next_index: int = 0
    read_len: int = 0

    def read(self) -> None:
        """Follow the output up to the end of the text."""
        if self.source is not self.params.prediction:
            self.source = self.params.prediction
            self.predicted = token_array([*self.source, SEPARATOR]) if self.source else EMPTY_TOKENS
            self.read_len = 0
        if self.read_len < self.prompt_len:
            self.next_index, self.read_len = 0, self.prompt_len
        if not self.source:
            return
        for token in self.text.since(self.read_len).tolist():
            self.next_index += int(self.predicted[self.next_index]) == token
        self.read_len = max(self.read_len, len(self.text))

    def match(self, max_places: int) -> Match:
        """The places where the output may be, and move to the best of them where that is sure."""
        output = self.text.since(self.prompt_len)[-LONGEST_MATCH:]
        if not self.source:
            return Match((), (), 0)
        if not len(output):
            return Match(((self.predicted, 0),), (1.0,), _EVIDENCE_AT_START)
        here = self._agreement(self.next_index, output)
        if here >= _SURE:
            return Match(((self.predicted, self.next_index),), (1.0,), here)
        found = self._agreeing(output)
        # Where nothing agrees, something was inserted before the next token, or has replaced it.
        lengths = {self.next_index: here}
        if here == 0 and self.next_index + 1 < len(self.predicted):
            lengths[self.next_index + 1] = 0
        lengths.update(found)
        # A place farther away must agree on more: short words stand everywhere.
        scores = {
            index: length - 0.5 * float(np.log2(1 + abs(index - self.next_index)))
            for index, length in lengths.items()
        }
        places = sorted(scores, key=lambda index: (-scores[index], abs(index - self.next_index)))
        places = places[:max_places]
        best = places[0]
        if lengths[best] >= _SURE:
            self.next_index = best
        weights = tuple(2.0 ** (scores[index] - scores[best]) for index in places)
        return Match(
            tuple((self.predicted, index) for index in places), weights, max(lengths[best], 1)
        )

    def _agreement(self, index: int, output: TokenArray) -> int:
        """How many tokens before `index` are those that the output ends with."""
        size = min(index, len(output))
        before, end = self.predicted[index - size : index], output[len(output) - size :]
        differing = np.flatnonzero(before != end)
        return size - 1 - int(differing[-1]) if len(differing) else size

    def _agreeing(self, output: TokenArray) -> dict[int, int]:
        """The places that agree with the end of the output: those that agree longest, and for
        every shorter length those nearest to where the output was.  Place -> length."""
        places = np.flatnonzero(self.predicted == output[-1]) + 1
        found: dict[int, int] = {}
        for length in range(1, len(output) + 1):
            if not len(places):
                break
            distances = np.abs(places - self.next_index)
            for index in places[np.argsort(distances, kind="stable")[:2]].tolist():
                found[index] = length
            if length < len(output):
                places = places[places > length]
                places = places[self.predicted[places - 1 - length] == output[-1 - length]]
        return found


class PredictionDrafter(CountDrafter[PredictionState, Match]):
    """Continues the request's own prediction; drafts nothing for requests without one."""

    def __init__(self, context: DrafterContext, options: PredictionOptions) -> None:
        super().__init__(context, options.min_survival, PredictionState.opened_by)
        self._max_places = options.max_places

    def _learn(self, state: PredictionState, start: int) -> None:
        state.read()

    def _unlearn(self, state: PredictionState, length: int) -> None:
        state.read_len = 0

    def _root(self, state: PredictionState) -> Match:
        state.read()
        return state.match(self._max_places)

    def _continuations(self, state: PredictionState, context: Match) -> Continuations[Match] | None:
        return context.continuations()
