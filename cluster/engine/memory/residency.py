"""Which sequences hold which pages: rollback, growth, commits, prefix sharing, preemption.

Invariants, for every sequence:
    len(shared) * page_size <= cached_len <= cached_len + len(tree) <= len(pages) * page_size
(the first but for a rollback into a shared page).  Where all layers have a window, a sequence lets
go of the pages that left it; one that rolls back to where some of them would be read again loses
all its pages: tokens are the truth, caches are guesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Indices

import numpy as np

from cluster.config import EngineConfig
from cluster.core import TokenArray, TokenTree
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.memory.pages import PagePool
from cluster.engine.memory.prefix_cache import PrefixCache, num_usable
from cluster.engine.memory.sequence import Sequence
from cluster.engine.work import Work
from cluster.errors import ProtocolError


class Residency:
    """Owns the sequences and every change to their pages."""

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        self._cache = cache
        self._page_size = cache.page_size
        self._reach = cache.reach
        self._prefixes = PrefixCache(cache.page_size, enabled=config.prefix_cache)
        self.pool = PagePool(cache.num_pages, self._prefixes)
        self.sequences: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._max_sequences = config.max_running_sequences

    def enter(self, request_id: str) -> Sequence:
        """The sequence of that request, opened empty where it is unknown."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            sequence = Sequence(request_id, self._num_arrivals, self._page_size)
            self._num_arrivals += 1
            self.sequences[request_id] = sequence
        return sequence

    def leave(self, request_id: str) -> None:
        """Forget a request and let go of its pages; an unknown one is no error."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            self.evacuate(sequence)

    def num_pages_for(self, length: int) -> int:
        return -(-length // self._page_size)

    def open(self, work: Work, sequence: Sequence) -> int | None:
        """Bring the cache in line with what `work` presumes; returns have_len where it cannot be.

        Afterwards the sequence holds a prefix of the work's context: at least base_len tokens, and
        those tokens of the delta, but the last, that it held already.
        """
        if work.base_len == 0 and work.tenant != sequence.tenant:
            self.evacuate(sequence)
            sequence.tenant = work.tenant
        if work.base_len > sequence.cached_len:
            return sequence.cached_len
        if work.prefix_hash is not None and (sequence.hash_at(work.base_len) != work.prefix_hash):
            return 0
        if work.num_cached_nodes:
            if sequence.cached_len != work.base_len or not _starts_with(sequence, work):
                self.truncate(sequence, work.base_len)
                return sequence.cached_len
            self._keep_nodes(sequence, work.num_cached_nodes)
            return None
        keep = work.base_len
        if sequence.cached_len > keep and len(work.delta) > 1:
            keep += common_prefix_len(sequence.tokens[keep:], work.delta[:-1])
        self.truncate(sequence, keep)
        return 0 if sequence.cached_len < work.base_len else None

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Roll back to `length` committed tokens, without nodes; pages beyond stay for now.

        To none at all where pages that would be read again have been released."""
        if self._reach.first_page(length) < sequence.num_released:
            self.evacuate(sequence)
            return
        rolls_back = length < sequence.cached_len
        sequence.truncate(length)
        if rolls_back:
            # The page that `length` falls into may be shared: `reserve` copies it when it grows.
            del sequence.shared[self.num_pages_for(length) :]
            self.trim(sequence)

    def _keep_nodes(self, sequence: Sequence, num_nodes: int) -> None:
        tree = sequence.tree
        sequence.tree = TokenTree(tree.token_ids[:num_nodes], tree.parents[:num_nodes])

    def trim(self, sequence: Sequence) -> None:
        """Let go of pages beyond the last slot in use."""
        keep = self.num_pages_for(sequence.num_slots_used)
        while len(sequence.pages) > keep:
            page = sequence.pop_page()
            if page is not None:
                self.pool.drop(page)

    def _release(self, sequence: Sequence, first: int) -> None:
        """Let go of the pages before page number `first`, which no row to come reads."""
        while sequence.num_released < min(first, len(sequence.pages)):
            self.pool.drop(sequence.release_page(self._cache.scratch_page))

    def adopt_prefix(self, sequence: Sequence, delta: TokenArray) -> int:
        """Continue a sequence that ends at a page border with cached pages; returns the tokens.

        delta: what follows the cached tokens.  Its last token is never covered: the caller wants
        the logits after it.
        """
        if not self._prefixes.enabled or sequence.cached_len != len(sequence.shared) * (
            self._page_size
        ):
            return 0
        self.trim(sequence)
        start = len(sequence.shared)
        entries = self._prefixes.match(sequence.prefix_end, delta[:-1])
        entries = entries[: num_usable(entries, start, self._reach)]
        first = self._reach.first_page((start + len(entries)) * self._page_size)
        self._release(sequence, first)
        for index, entry in enumerate(entries, start):
            if index < first:
                sequence.add_released_page(self._cache.scratch_page)
            else:
                assert entry.page is not None, "an evicted page was taken for a usable one"
                self.pool.hold(entry.page)
                sequence.add_page(entry.page)
            sequence.shared.append(entry)
        num_tokens = len(entries) * self._page_size
        sequence.append(delta[:num_tokens])
        return num_tokens

    def num_pages_missing(self, sequence: Sequence, length: int) -> int:
        """Pages `reserve` would allocate."""
        missing = self.num_pages_for(length) - len(sequence.pages)
        return max(0, missing) + self._must_copy(sequence)

    def _must_copy(self, sequence: Sequence) -> bool:
        return len(sequence.shared) * self._page_size > sequence.cached_len

    def reserve(self, sequence: Sequence, length: int) -> None:
        """Make positions cached_len .. length writable; needs num_pages_missing available pages."""
        if self._must_copy(sequence):
            self._copy_last_shared(sequence)
        while len(sequence.pages) * self._page_size < length:
            sequence.add_page(self.pool.allocate(sequence.pages[-1] if sequence.pages else -1))

    def _copy_last_shared(self, sequence: Sequence) -> None:
        """Copy on write: a rollback ended inside a page that the prefix cache knows."""
        index = len(sequence.shared) - 1
        del sequence.shared[index]
        start = index * self._page_size
        source = sequence.slots[start : sequence.cached_len].copy()
        former = sequence.replace_page(index, self.pool.allocate())
        self._cache.move(source, sequence.slots[start : sequence.cached_len].copy())
        self.pool.drop(former)

    def commit(self, sequence: Sequence, token_ids: TokenArray) -> None:
        """The KV of these tokens has been written behind the context."""
        sequence.append(token_ids)
        self._publish(sequence)
        self._release(sequence, self._reach.first_page_kept(sequence.cached_len))

    def _publish(self, sequence: Sequence) -> None:
        """Enter full pages of committed tokens into the prefix cache."""
        if not self._prefixes.enabled:
            return
        size = self._page_size
        while (len(sequence.shared) + 1) * size <= sequence.cached_len:
            index = len(sequence.shared)
            parent = sequence.prefix_end
            page_tokens = sequence.tokens[index * size : (index + 1) * size]
            entry = self._prefixes.find(parent, page_tokens)
            if entry is None:
                entry = self._prefixes.insert(parent, page_tokens, sequence.pages[index])
            elif entry.page is None:
                self._prefixes.restore(entry, sequence.pages[index])
            elif entry.page != sequence.pages[index]:
                # Another sequence computed the same page meanwhile; one copy is enough.
                self.pool.hold(entry.page)
                self.pool.drop(sequence.replace_page(index, entry.page))
            sequence.shared.append(entry)

    def retain(self, sequence: Sequence, path: Indices[int], keep: Indices[int]) -> None:
        """Commit the nodes `path`, keep the nodes `keep` as the live tree, drop the others."""
        tree = sequence.tree
        new_parents = _check_retained(tree, path, keep)
        survivors = np.asarray([*path, *keep], dtype=np.int64)
        start = sequence.cached_len
        moved = np.flatnonzero(survivors != np.arange(len(survivors)))
        if len(moved):
            # Slots up to the first node that moves are in place already.
            offsets = np.arange(moved[0], len(survivors))
            slots = sequence.slots
            self._cache.move(slots[start + survivors[offsets]], slots[start + offsets])
        self.commit(sequence, tree.token_ids[survivors[: len(path)]])
        if keep:
            sequence.tree = TokenTree(tree.token_ids[survivors[len(path) :]], new_parents)
        self.trim(sequence)

    def evacuate(self, sequence: Sequence) -> None:
        """Drop everything the sequence holds, the last page first."""
        sequence.truncate(0)
        sequence.shared.clear()
        self.trim(sequence)

    @property
    def shares_prefixes(self) -> bool:
        return self._prefixes.enabled

    def has_place(self, sequence: Sequence) -> bool:
        """Whether the sequence holds pages, or may come to hold some beside those that do."""
        if sequence.pages or len(self.sequences) <= self._max_sequences:
            return True
        return sum(bool(each.pages) for each in self.sequences.values()) < self._max_sequences

    def has_room(self, sequence: Sequence, length: int) -> bool:
        """Whether `reserve` may be called at once."""
        enough = self.num_pages_missing(sequence, length) <= self.pool.num_available
        return enough and self.has_place(sequence)

    def younger_holders(self, arrival: int) -> list[Sequence]:
        """Sequences that hold pages and came after `arrival`, the youngest first."""
        holders = [
            sequence
            for sequence in self.sequences.values()
            if sequence.pages and sequence.arrival > arrival
        ]
        return sorted(holders, key=lambda sequence: sequence.arrival, reverse=True)

    def num_reclaimable(self, victims: Iterable[Sequence]) -> int:
        """Pages that would become available if all of `victims` let go of theirs."""
        held = Counter(page for victim in victims for page in victim.held_pages)
        return sum(count == self.pool.num_holders(page) for page, count in held.items())

    def forget_prefixes(self) -> None:
        """Empty the prefix cache of pages that nobody holds."""
        self.pool.clear_idle()

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not balance; cheap enough for idle moments."""
        holders: Counter[int] = Counter()
        for sequence in self.sequences.values():
            self._check_sequence(sequence)
            holders.update(sequence.held_pages)
        self.pool.check_integrity(holders)
        self._prefixes.check_integrity()

    def _check_sequence(self, sequence: Sequence) -> None:
        capacity, first = len(sequence.pages) * self._page_size, sequence.num_released
        assert sequence.num_slots_used <= capacity, f"{sequence.request_id}: too few pages"
        assert len(set(sequence.held_pages)) == len(sequence.held_pages), "a page is held twice"
        assert set(sequence.pages[:first]) <= {self._cache.scratch_page}, "a page was not released"
        assert first <= self._reach.first_page(sequence.cached_len), "a page in sight was released"
        for entry, page in zip(sequence.shared[first:], sequence.held_pages, strict=False):
            assert entry.page == page, "a shared page was replaced"


def _starts_with(sequence: Sequence, work: Work) -> bool:
    """Whether the live nodes begin with the work's cached nodes."""
    count, live = work.num_cached_nodes, sequence.tree
    if count > len(live):
        return False
    return bool(
        np.array_equal(live.token_ids[:count], work.tree.token_ids[:count])
        and np.array_equal(live.parents[:count], work.tree.parents[:count])
    )


def common_prefix_len(left: TokenArray, right: TokenArray) -> int:
    """How many leading tokens agree."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


def _check_retained(tree: TokenTree, path: Indices[int], keep: Indices[int]) -> TokenArray:
    """The kept nodes' new parents; raises ProtocolError where path or keep is none of the tree."""
    parent = -1
    for node in path:
        if not 0 <= node < len(tree) or tree.parents[node] != parent:
            raise ProtocolError(
                f"path {list(path)} is no path from the context in a tree of {len(tree)} live nodes"
            )
        parent = int(node)
    renumbered = {parent: -1}
    new_parents = np.empty(len(keep), dtype=np.int32)
    former = -1
    for index, node in enumerate(keep):
        if not former < node < len(tree) or int(tree.parents[node]) not in renumbered:
            raise ProtocolError(
                f"kept node {node} is out of order, or neither its parent is kept nor the end of "
                f"the path ({len(tree)} live nodes)"
            )
        new_parents[index] = renumbered[int(tree.parents[node])]
        renumbered[int(node)] = index
        former = node
    return new_parents
