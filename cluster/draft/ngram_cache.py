"""N-gram cache: the most frequent continuations of the last words in all text seen so far.

One store per tenant and task class, shared by all requests of it and kept when they end.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.committed_text import gram_keys
from cluster.draft.count_drafter import CountDrafter, CountState
from cluster.draft.count_tree import Continuations
from cluster.draft.gram_index import check_at_least, check_ngrams
from cluster.spec.token_log import TokenLog, prefix_hash


@dataclass(frozen=True, slots=True)
class NgramCacheOptions:
    """min_ngram, max_ngram: shortest and longest context that is counted, in tokens.

    max_contexts: contexts that one store keeps, at about 250 bytes each; when it is full the half
    that was unused for longest is dropped.  max_stores: number of stores; each tenant and task
    class has its own, and the one unused for longest is dropped.  max_continuations: different next
    tokens that are counted per context.  min_survival: less likely nodes are left out.
    """

    min_ngram: int = 1
    max_ngram: int = 4
    max_contexts: int = 200_000
    max_stores: int = 8
    max_continuations: int = 8
    min_survival: float = 0.02

    def __post_init__(self) -> None:
        check_ngrams(self.min_ngram, self.max_ngram)
        check_at_least(1, max_stores=self.max_stores, max_continuations=self.max_continuations)
        check_at_least(2, max_contexts=self.max_contexts)


class GramStore:
    """Counts of the tokens that followed each context; bounded.

    Contexts live in two dictionaries, young and old.  A touched context moves to the young one;
    when that is half of the bound the old one is dropped and they change places.  So eviction
    costs nothing and forgets the least recently used half.
    """

    def __init__(self, max_contexts: int, max_continuations: int) -> None:
        self._half = max(max_contexts // 2, 1)
        self._max_continuations = max_continuations
        # context key -> [token, count, token, count, ...]
        self._young: dict[int, list[int]] = {}
        self._old: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, key: int, token_id: int) -> None:
        counts = self.counts(key)
        if counts is None:
            self._insert(key, [token_id, 1])
            return
        for index in range(0, len(counts), 2):
            if counts[index] == token_id:
                counts[index + 1] += 1
                return
        if len(counts) < 2 * self._max_continuations:
            counts.extend((token_id, 1))
            return
        # Space-saving (Metwally et al. 2005): the newcomer inherits the least count, plus one.
        least = min(range(1, len(counts), 2), key=counts.__getitem__)
        counts[least - 1] = token_id
        counts[least] += 1

    def counts(self, key: int) -> list[int] | None:
        """[token, count, token, count, ...] of a context; the list stays the store's."""
        counts = self._young.get(key)
        if counts is None:
            counts = self._old.pop(key, None)
            if counts is not None:
                self._insert(key, counts)
        return counts

    def _insert(self, key: int, counts: list[int]) -> None:
        if len(self._young) >= self._half:
            self._young, self._old = {}, self._young
        self._young[key] = counts


@dataclass(slots=True, eq=False)
class _CacheState(CountState):
    learned_len: int = 0  # tokens already counted; a rollback does not count them again


class NgramCacheDrafter(CountDrafter[_CacheState, tuple[int, ...]]):
    """Counts n-grams of everything committed; a context is the tuple of the last few tokens."""

    def __init__(self, context: DrafterContext, options: NgramCacheOptions) -> None:
        super().__init__(context, options.min_survival, _CacheState.opened_by)
        self._options = options
        self._stores = Bounded(
            lambda: GramStore(options.max_contexts, options.max_continuations), options.max_stores
        )

    @property
    def num_contexts(self) -> int:
        """Contexts held over all stores."""
        return sum(len(store) for store in self._stores)

    def _learn(self, state: _CacheState, start: int) -> None:
        start = max(start, state.learned_len)
        state.learned_len = max(state.learned_len, len(state.text))
        store = self._stores.of(state.circle)
        for size in range(self._options.min_ngram, self._options.max_ngram + 1):
            first = max(start, size)  # the first token with a whole context before it
            if first >= len(state.text):
                continue
            keys = gram_keys(state.text, size, first - 1)[:-1].tolist()
            following = state.text.token_ids[first:].tolist()
            for key, token_id in zip(keys, following, strict=True):
                store.add(key ^ size, token_id)

    def _unlearn(self, state: _CacheState, length: int) -> None:
        """Nothing: the text was committed once, and its statistics are as good as any."""

    def _root(self, state: _CacheState) -> tuple[int, ...]:
        return _last_tokens(state.text, self._options.max_ngram)

    def _continuations(
        self, state: _CacheState, context: tuple[int, ...]
    ) -> Continuations[tuple[int, ...]] | None:
        """Those of the longest known context; a doubling of its count is as good as a token."""
        store = self._stores.of(state.circle)
        for size in range(min(self._options.max_ngram, len(context)), 0, -1):
            if size < self._options.min_ngram:
                return None
            counts = store.counts(prefix_hash(context[len(context) - size :]) ^ size)
            if counts is not None:
                token_ids = counts[0::2]
                evidence = size + sum(counts[1::2]).bit_length() - 1
                return Continuations(
                    evidence,
                    token_ids,
                    counts[1::2],
                    [(*context, token)[-self._options.max_ngram :] for token in token_ids],
                )
        return None


def _last_tokens(text: TokenLog, count: int) -> tuple[int, ...]:
    return tuple(text.token_ids[-count:].tolist())
