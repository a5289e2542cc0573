"""The states of sequences at borders of pages, where layers keep a matrix of all tokens before.

A state is a page of one more pool: every such layer's matrix behind some whole pages of a text.  A
sequence holds that of its last border, and the other groups' pages from there on, whose rows are
read; while a step writes the state of the next border, it holds a spare place.  Nothing is written
to a state that a sequence reads.  An entry of the prefix cache has the state behind its page or
none: a continuation needs that of its last page.  Places that only the prefix cache keeps are taken
back like pages, least recently used first.
"""

from __future__ import annotations

from cluster.engine.memory.kv_cache import KVCache, Reach
from cluster.engine.memory.prefix_cache import CachedPage, PagePool, PrefixCache
from cluster.engine.memory.sequence import Sequence


class StateOwners:
    """Owns every change to what sequences hold of states; without such layers it does nothing."""

    def __init__(self, cache: KVCache, prefixes: PrefixCache) -> None:
        """prefixes: with one group more than the cache, for states."""
        self._group, self._page_size = len(cache.groups), cache.page_size
        self._prefixes = prefixes
        self.pool = PagePool(cache.num_states, prefixes, self._group)
        self.exist = cache.num_states > 0
        # What a continuation reads of states.
        self.reaches = [Reach(cache.page_size, cache.page_size)] if self.exist else []
        if self.exist:
            self.pool.allocate()  # the first place: the state before any token

    def most_sequences(self, most: int) -> int:
        """So many sequences have places at any time, of `most` that are wanted."""
        return min(most, (self.pool.num_pages - 1) // 2) if self.exist else most

    def reserve(self, sequence: Sequence, context_len: int) -> None:
        """Make room for the state of the last border in so many tokens."""
        if self.exist and not sequence.spare and sequence.border_in(context_len) > sequence.border:
            sequence.spare = self.pool.allocate()

    def commit(self, sequence: Sequence) -> None:
        """A step has written the state of its last border, if there was room made for it."""
        border = sequence.border_in(sequence.cached_len)
        if sequence.spare and border > sequence.border:
            self._keep(sequence, border, sequence.spare)
            sequence.spare = 0

    def share(self, sequence: Sequence) -> None:
        """Enter the state where its page is in the prefix cache, or take the one there."""
        num_pages = sequence.border // self._page_size
        if not 0 < num_pages <= len(sequence.shared):
            return
        entry = sequence.shared[num_pages - 1]
        cached = entry.pages[self._group]
        if cached is None:
            self._prefixes.restore(entry, self._group, sequence.state)
        elif cached != sequence.state:
            self.adopt(sequence, entry, sequence.border)

    def adopt(self, sequence: Sequence, entry: CachedPage, border: int) -> None:
        """Continue from the state behind the entry's page, which is the border's."""
        state = entry.pages[self._group]
        if state is not None:
            self.pool.hold(state)
            self._keep(sequence, border, state)

    def leave(self, sequence: Sequence) -> None:
        """Let go of all."""
        self._keep(sequence, 0, 0)
        if sequence.spare:
            self.pool.drop(sequence.spare)
            sequence.spare = 0

    def first_page_kept(self, sequence: Sequence, first: int) -> int:
        """The first page that a sequence keeps of a group that reads those from `first` on."""
        return min(first, sequence.border // self._page_size) if self.exist else first

    def _keep(self, sequence: Sequence, border: int, state: int) -> None:
        """Let go of the state for another that it holds, or for 0."""
        if sequence.state:
            self.pool.drop(sequence.state)
        sequence.border, sequence.state = border, state
