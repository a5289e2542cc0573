"""Token recycling: drafts from what the target thought likely after the same words before.

Luo et al., "Turning Trash into Treasure" (2024).  A step gives the most probable tokens of every
row, those of rejected drafts too; they are kept by the words that they followed, the newest in
place of older ones, and drafts follow them from word to word.  Kept too are those after two words,
which agree more often where they are known.

The requests of a tenant and task class share what they keep, as those of the suffix drafter do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.count_drafter import CountDrafter, CountState
from cluster.draft.count_tree import Continuations
from cluster.draft.gram_index import check_at_least
from cluster.draft.inside import StepRows, StepWants, host_of
from cluster.spec.params import divisor

# A greedy target draws its most probable token, which was not always the most probable one after
# these words: how much the order of then counts, as a temperature of what was probable then.
_GREEDY_TEMPERATURE = 0.5

Words = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenRecyclingOptions:
    """num_top: most probable tokens that are kept after each context.

    max_words: words of the longest context, in tokens; shorter ones are kept too.
    max_contexts: contexts that one store keeps, at about 250 bytes each; when it is full, those
    that were written longest ago are dropped.  max_stores: number of stores; each tenant and task
    class has its own, and the one unused for longest is dropped.
    min_survival: less likely nodes are left out.
    """

    num_top: int = 8
    max_words: int = 2
    max_contexts: int = 100_000
    max_stores: int = 8
    min_survival: float = 0.02

    def __post_init__(self) -> None:
        check_at_least(
            1, num_top=self.num_top, max_words=self.max_words, max_contexts=self.max_contexts,
            max_stores=self.max_stores,
        )  # fmt: skip


class Adjacency:
    """What followed each context last: tokens, the most probable first, and log-probabilities."""

    def __init__(self, max_contexts: int) -> None:
        self._max_contexts = max_contexts
        # As bytes, int32 and float32: a tenth of the memory of lists.
        self._after: dict[Words, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        return len(self._after)

    def put(self, words: Words, token_ids: bytes, logprobs: bytes) -> None:
        self._after.pop(words, None)  # what is written stands last
        self._after[words] = (token_ids, logprobs)
        if len(self._after) > self._max_contexts:
            del self._after[next(iter(self._after))]

    def after(self, words: Words) -> tuple[list[int], np.ndarray] | None:
        """(token ids, log-probabilities), None for a context that never was."""
        found = self._after.get(words)
        if found is None:
            return None
        return np.frombuffer(found[0], np.int32).tolist(), np.frombuffer(found[1], np.float32)


class TokenRecyclingDrafter(CountDrafter[CountState, Words]):
    """Drafts inside the target alone: nobody else sees what it thinks likely."""

    def __init__(self, context: DrafterContext, options: TokenRecyclingOptions) -> None:
        super().__init__(context, options.min_survival, CountState.opened_by)
        host_of(context.target, context.name, "token_recycling")
        self._options = options
        self._stores = Bounded(lambda: Adjacency(options.max_contexts), options.max_stores)
        self.wants = StepWants(num_top=options.num_top)

    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: keep what every row of the step thought likely."""
        for each in rows:
            if each.top is not None:
                self._keep(each)

    def _keep(self, rows: StepRows) -> None:
        top, longest = rows.top, self._options.max_words
        assert top is not None
        store = self._stores.of((rows.tenant, rows.task))
        tokens, last = rows.token_ids.tolist(), rows.num_context - 1
        # Of the last row of the text, then of each node: its words so far.
        words = [(*self._words_before(rows, last), tokens[last])]
        for parent, token in zip(rows.parents.tolist(), tokens[last + 1 :], strict=True):
            words.append((*words[parent + 1], token)[-longest:])
        logprobs = top.logprobs.astype(np.float32, copy=False)
        for index, path in enumerate(words):
            after = top.token_ids[index].tobytes(), logprobs[index].tobytes()
            for length in range(1, min(longest, len(path)) + 1):
                store.put(path[-length:], *after)

    def _words_before(self, rows: StepRows, last: int) -> Words:
        """The text before its last row, as far as it is known and of use."""
        count = self._options.max_words - 1
        if not count:
            return ()
        if last >= count:
            return tuple(rows.token_ids[last - count : last].tolist())
        state = self._requests.get(rows.request_id, rows.generation)
        end = rows.first_position + last
        if state is None or len(state.text) < end:
            return tuple(rows.token_ids[:last].tolist())
        return tuple(state.text.token_ids[max(end - count, 0) : end].tolist())

    def _learn(self, state: CountState, start: int) -> None:
        """Nothing is learned from text: see `read`."""

    def _unlearn(self, state: CountState, length: int) -> None:
        """See `_learn`."""

    def _root(self, state: CountState) -> Words:
        return tuple(state.text.token_ids[-self._options.max_words :].tolist())

    def _continuations(self, state: CountState, context: Words) -> Continuations[Words] | None:
        store = self._stores.of(state.circle)
        for length in range(len(context), 0, -1):
            found = store.after(context[-length:])
            if found is not None:
                token_ids, logprobs = found
                weights = np.exp(logprobs / (divisor(state.params) or _GREEDY_TEMPERATURE))
                longest = self._options.max_words
                after = [(*context, token)[-longest:] for token in token_ids]
                # A weight of zero has no logarithm.
                return Continuations(length, token_ids, np.maximum(weights, 1e-9).tolist(), after)
        return None
