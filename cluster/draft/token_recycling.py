"""Token recycling: drafts from what the target thought likely after the same words before.

Luo et al., "Turning Trash into Treasure" (2024).  A step gives the most probable tokens of every
row, those of rejected drafts too; they are kept by the words that they followed, the newest in
place of older ones, and drafts follow them from word to word.  Kept too are those after two words,
which agree more often where they are known.

The requests of a tenant and task class share what they keep, as those of the suffix drafter do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cluster.config.parse import PositiveInt, Share
from cluster.core import TokenArray
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.count_drafter import CountDrafter, CountState
from cluster.draft.indexed_text import Continuations
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.draft.lookups import CountedText
from cluster.draft.native import lookups as native
from cluster.spec.params import divisor

# A greedy target draws its most probable token, which was not always the most probable one after
# these words: how much the order of then counts, as a temperature of what was probable then.
_GREEDY_TEMPERATURE = 0.5

Words = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenRecyclingOptions:
    """The target's own next choices after the same words, from its earlier steps."""

    num_top: PositiveInt = 8
    """Most probable tokens that are kept after each context."""
    max_words: PositiveInt = 2
    """Words of the longest context, in tokens; shorter ones are kept too."""
    max_contexts: PositiveInt = 100_000
    """Contexts that one store keeps, at about 250 bytes each; when it is full, those that were
    written longest ago are dropped."""
    max_stores: PositiveInt = 8
    """Number of stores; each tenant and task class has its own, and the one unused for longest is
    dropped."""
    min_survival: Share = 0.02
    """Less likely nodes are left out."""


class Adjacency:
    """The newest most probable tokens behind each context, best first, with log-probabilities.

    A `Source`; native/recycled.cpp does the same.
    """

    def __init__(self, max_contexts: int, max_words: int) -> None:
        self._max_contexts = max_contexts
        self._max_words = max_words
        self._after: dict[Words, tuple[list[int], list[float]]] = {}

    def __len__(self) -> int:
        return len(self._after)

    def keep(self, rows: StepRows, before: TokenArray) -> None:
        """Keep what was likely at the text's last row, behind `before`, and at the nodes."""
        assert rows.top is not None
        likely = zip(rows.top.token_ids.tolist(), rows.top.logprobs.tolist(), strict=True)
        for path, after in zip(rows.paths(before, self._max_words), likely, strict=True):
            for length in range(1, len(path) + 1):
                words = path[-length:]
                self._after.pop(words, None)  # what is written stands last
                self._after[words] = after
                if len(self._after) > self._max_contexts:
                    del self._after[next(iter(self._after))]

    def root(self, text: CountedText, position: int) -> _Words:
        longest, temperature = self._max_words, divisor(text.params) or _GREEDY_TEMPERATURE
        return _Words(self._after, tuple(text.tokens[-longest:]), longest, temperature)


@dataclass(frozen=True, slots=True)
class _Words:
    """The end of a text and of what is drafted behind it; `longest` words at most."""

    known: Mapping[Words, tuple[list[int], list[float]]]
    words: Words
    longest: int
    temperature: float

    def continuations(self) -> Continuations | None:
        """Those of the longest known end."""
        for length in range(len(self.words), 0, -1):
            found = self.known.get(self.words[-length:])
            if found is not None:
                token_ids, logprobs = found
                # A weight of zero has no logarithm.
                weights = np.maximum(np.exp(np.array(logprobs) / self.temperature), 1e-9).tolist()
                after = [
                    replace(self, words=(*self.words, token)[-self.longest :])
                    for token in token_ids
                ]
                return Continuations(length, token_ids, weights, after, trust=1.0)
        return None


class TokenRecyclingDrafter(CountDrafter[CountState]):
    """Drafts inside the target alone: nobody else sees what it thinks likely."""

    def __init__(self, context: DrafterContext, options: TokenRecyclingOptions) -> None:
        ways, adjacency = native.fastest(Adjacency, native.Adjacency)
        super().__init__(context, options.min_survival, CountState.opened_by, ways)
        host_of(context.target, context.name, "token_recycling")
        self._max_words = options.max_words
        self._stores = Bounded(
            lambda: adjacency(options.max_contexts, options.max_words), options.max_stores
        )
        self.wants = StepWants(num_top=options.num_top)

    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: keep what every row of the step thought likely."""
        for each in rows:
            if each.top is not None:
                state = self._requests.get(each.request_id, each.generation)
                text = None if state is None else state.text
                before = each.last_words(self._max_words, text)
                self._stores.of((each.tenant, each.task)).keep(each, before)

    def _source(self, state: CountState) -> Any:
        return self._stores.of(state.circle)
