"""The pages of sequences: rollback, growth, commits, prefix sharing, preemption.

Invariants, for every sequence:
    len(shared) * page_size <= cached_len <= cached_len + len(tree) <= num_pages * page_size
Every group of layers has a table of that many pages, and a pool that they come from.  A page that
may be shared is never written to again: a rollback into one goes back to where it begins.  Where
the group has a window, a sequence lets go of the pages that left it; one that rolls back to where
some of them would be read again loses all its pages: tokens are the truth, caches are guesses.
`states` says what is held besides where layers keep a matrix of all tokens before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Indices

from cluster.config.schema import EngineConfig
from cluster.core import EMPTY_TREE, TokenArray, TokenTree
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.memory.prefix_cache import CachedPage, PagePool, PrefixCache, num_usable
from cluster.engine.memory.sequence import NO_SLOTS, Sequence, Slots, kept_parents, starts_with
from cluster.engine.memory.states import StateOwners
from cluster.engine.work import Work
from cluster.spec.token_log import common_prefix_len


class PageOwners:
    """Owns the sequences and every change to their pages."""

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        self._cache = cache
        self._page_size = cache.page_size
        self._reaches = [group.reach for group in cache.groups]
        self._windowed = [
            group for group, reach in enumerate(self._reaches) if reach.window is not None
        ]
        self.shares_prefixes = config.prefix_cache
        self._prefixes = PrefixCache(cache.page_size, len(cache.groups) + 1)
        self.states = StateOwners(cache, self._prefixes)
        self.pools = [
            PagePool(num_pages, self._prefixes, group)
            for group, num_pages in enumerate(cache.num_pages)
        ]
        self.sequences: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._max_sequences = self.states.most_sequences(config.max_running_sequences)

    def enter(self, request_id: str) -> Sequence:
        """The sequence of that request, opened empty where it is unknown."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            sequence = Sequence(request_id, self._num_arrivals, self._page_size, len(self.pools))
            self._num_arrivals += 1
            self.sequences[request_id] = sequence
        return sequence

    def leave(self, request_id: str) -> None:
        """Forget a request and let go of its pages; an unknown one is no error."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.evacuate(sequence)

    def slots(self, request_id: str, layer: int) -> Slots:
        """A copy of the slots of the request's tokens and nodes: int64[tokens + nodes]."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return NO_SLOTS
        self._cache.settle()  # who asks for slots reads them
        table = sequence.tables[self._cache.group_of[layer]]
        return table.slots[: sequence.num_slots_used].copy()

    def adapters_in_use(self) -> set[int]:
        """The adapters that requests run with, or are about to."""
        sequences = self.sequences.values()
        used = {each.adapter for each in sequences}
        return used | {each.work.adapter for each in sequences if each.work is not None}

    def num_pages_for(self, length: int) -> int:
        return -(-length // self._page_size)

    def open(self, work: Work, sequence: Sequence) -> int | None:
        """Bring the cache in line with what `work` presumes; returns have_len where it cannot be.

        Afterwards the sequence holds a prefix of the work's context: at least base_len tokens, and
        those tokens of the delta, but the last, that it held already.
        """
        is_another = work.base_len == 0 and work.tenant != sequence.tenant
        if is_another or work.adapter != sequence.adapter:
            self.evacuate(sequence)
            sequence.adapter = work.adapter
        if is_another:
            sequence.tenant = work.tenant
        if work.base_len > sequence.cached_len:
            return sequence.cached_len
        if work.prefix_hash is not None and (sequence.hash_at(work.base_len) != work.prefix_hash):
            return 0
        if work.num_cached_nodes:
            if sequence.cached_len != work.base_len or not starts_with(sequence, work):
                self.truncate(sequence, work.base_len)
                return sequence.cached_len
            sequence.tree = sequence.tree.first(work.num_cached_nodes)
            return None
        keep = work.base_len
        if sequence.cached_len > keep and len(work.delta) > 1:
            keep += common_prefix_len(sequence.tokens[keep:], work.delta[:-1])
        self.truncate(sequence, keep)
        return sequence.cached_len if sequence.cached_len < work.base_len else None

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Roll back to `length` committed tokens or, inside a page that may be shared, to where it
        begins; without nodes.

        The sequence loses all its pages where some that would be read again have been released."""
        if length == sequence.cached_len:
            sequence.tree = EMPTY_TREE
            return
        if length < len(sequence.shared) * self._page_size:
            length -= length % self._page_size
        pairs = zip(sequence.tables, self._reaches, strict=True)
        if length < sequence.border or any(
            reach.first_page(length) < table.num_released for table, reach in pairs
        ):
            self.evacuate(sequence)
            return
        rolls_back = length < sequence.cached_len
        sequence.truncate(length)
        if rolls_back:
            del sequence.shared[self.num_pages_for(length) :]
            self.trim(sequence)

    def trim(self, sequence: Sequence) -> None:
        """Let go of pages beyond the last slot in use."""
        keep = self.num_pages_for(sequence.num_slots_used)
        for table, pool in zip(sequence.tables, self.pools, strict=True):
            while len(table.pages) > keep:
                page = table.pop()
                if page is not None:
                    pool.drop(page)

    def _release(self, sequence: Sequence, group: int, first: int) -> None:
        """Let go of the pages before page number `first`, which no row to come reads."""
        table = sequence.tables[group]
        while table.num_released < min(first, len(table.pages)):
            self.pools[group].drop(table.release(self._cache.num_pages[group]))

    def adopt_prefix(self, sequence: Sequence, delta: TokenArray) -> int:
        """Continue a sequence that ends at a page border with cached pages; returns the tokens.

        delta: what follows the cached tokens.  Its last token is never covered: the caller wants
        the logits after it.
        """
        start = len(sequence.shared)
        if not self.shares_prefixes or sequence.cached_len != start * self._page_size:
            return 0
        self.trim(sequence)
        entries = self._prefixes.match(sequence.prefix_end, delta[:-1])
        if self.states.exist:
            sequence.known_len = (start + len(entries)) * self._page_size
        reaches = [*self._reaches, *self.states.reaches]
        entries = entries[: num_usable(entries, start, reaches)]
        if not entries:
            return 0
        length = (start + len(entries)) * self._page_size
        self.states.adopt(sequence, entries[-1], length)
        for group, reach in enumerate(self._reaches):
            first = reach.first_page(length)
            self._release(sequence, group, first)
            self._adopt(sequence, group, entries, first)
        num_tokens = length - sequence.cached_len
        sequence.shared += entries
        sequence.append(delta[:num_tokens])
        return num_tokens

    def _adopt(
        self, sequence: Sequence, group: int, entries: Indices[CachedPage], first: int
    ) -> None:
        """Add the entries' pages to a table, those before page number `first` as released."""
        table = sequence.tables[group]
        for entry in entries:
            if len(table.pages) < first:
                table.add_released(self._cache.num_pages[group])
                continue
            page = entry.pages[group]
            assert page is not None, "an evicted page was taken for a usable one"
            self.pools[group].hold(page)
            table.add(page)

    @property
    def num_available(self) -> int:
        """The number of pages that `reserve` may allocate: it takes them from every pool."""
        return min(pool.num_available for pool in self.pools)

    def num_pages_missing(self, sequence: Sequence, length: int) -> int:
        """Pages that `reserve` would allocate from every pool."""
        return max(0, self.num_pages_for(length) - sequence.num_pages)

    def reserve(self, sequence: Sequence, length: int, context_len: int = 0) -> None:
        """Make positions cached_len .. length writable; needs num_pages_missing available pages.

        context_len: of them those that will be committed at once."""
        self.states.reserve(sequence, context_len)
        for table, pool in zip(sequence.tables, self.pools, strict=True):
            while len(table.pages) * self._page_size < length:
                table.add(pool.allocate())

    def commit(self, sequence: Sequence, token_ids: TokenArray) -> None:
        """Record that a step has written the KV of these tokens behind the context."""
        sequence.append(token_ids)
        self.states.commit(sequence)
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Share what more tokens allow to, and let go of what they make needless."""
        self._publish(sequence)
        self.states.share(sequence)
        for group in self._windowed:
            first = self._reaches[group].first_page_kept(sequence.cached_len)
            self._release(sequence, group, self.states.first_page_kept(sequence, first))

    def _publish(self, sequence: Sequence) -> None:
        """Enter full pages of committed tokens into the prefix cache."""
        if not self.shares_prefixes:
            return
        size, length = self._page_size, sequence.cached_len
        while (len(sequence.shared) + 1) * size <= length:
            index = len(sequence.shared)
            parent = sequence.prefix_end
            page_tokens = sequence.tokens[index * size : (index + 1) * size]
            found = self._prefixes.match(parent, page_tokens)
            if found:
                self._join(sequence, index, found[0])
            else:
                pages = [*(table.pages[index] for table in sequence.tables), None]
                found = [self._prefixes.insert(parent, page_tokens, pages)]
            sequence.shared += found

    def _join(self, sequence: Sequence, index: int, entry: CachedPage) -> None:
        """Give a page to an entry that lacks it, or take the entry's instead of the own: another
        sequence computed the same page meanwhile, and one copy is enough."""
        for group, (table, pool) in enumerate(zip(sequence.tables, self.pools, strict=True)):
            own, cached = table.pages[index], entry.pages[group]
            if cached is None:
                self._prefixes.restore(entry, group, own)
            elif cached != own:
                pool.hold(cached)
                pool.drop(table.replace(index, cached))

    def retain(self, sequence: Sequence, path: Indices[int], keep: Indices[int]) -> None:
        """Commit the nodes `path`, keep the nodes `keep` as the live tree, drop the others."""
        tree = sequence.tree
        new_parents = kept_parents(tree, path, keep)
        survivors, start = [*path, *keep], sequence.cached_len
        # Slots up to the first node that moves are in place already.
        first = next((place for place, node in enumerate(survivors) if place != node), None)
        if first is not None:
            for group, table in enumerate(sequence.tables):
                slots = table.slots[start : start + len(tree)].tolist()
                source = [slots[node] for node in survivors[first:]]
                self._cache.move(group, source, slots[first : len(survivors)])
        if path:
            sequence.append(tree.token_ids.take(path))
            self._settle(sequence)
        sequence.tree = EMPTY_TREE
        if keep:
            sequence.tree = TokenTree(tree.token_ids[list(keep)], new_parents)
        self.trim(sequence)

    def evacuate(self, sequence: Sequence) -> None:
        """Drop everything the sequence holds, the last page first."""
        sequence.truncate(0)
        sequence.shared.clear()
        self.states.leave(sequence)
        self.trim(sequence)

    def has_place(self, sequence: Sequence) -> bool:
        """True if the sequence holds pages, or may come to hold some beside those that do."""
        if sequence.num_pages or len(self.sequences) <= self._max_sequences:
            return True
        return sum(bool(each.num_pages) for each in self.sequences.values()) < self._max_sequences

    def has_room(self, sequence: Sequence, length: int) -> bool:
        """True if `reserve` may be called at once."""
        enough = self.num_pages_missing(sequence, length) <= self.num_available
        return enough and self.has_place(sequence)

    def younger_holders(self, arrival: int) -> list[Sequence]:
        """Sequences that hold pages and came after `arrival`, the youngest first."""
        holders = [
            sequence
            for sequence in self.sequences.values()
            if sequence.num_pages and sequence.arrival > arrival
        ]
        return sorted(holders, key=lambda sequence: sequence.arrival, reverse=True)

    def num_available_without(self, victims: Indices[Sequence]) -> int:
        """The value of `num_available` if all of `victims` let go of their pages."""
        numbers: list[int] = []
        for group, pool in enumerate(self.pools):
            held = Counter(page for each in victims for page in each.tables[group].held_pages)
            let_go = sum(count == pool.holders[page] for page, count in held.items())
            numbers.append(pool.num_available + let_go)
        return min(numbers)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache of pages that nobody holds."""
        for pool in (*self.pools, self.states.pool):
            pool.clear_idle()
