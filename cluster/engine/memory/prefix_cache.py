"""Finds the pages of a prefix that another sequence has already computed.

One trie per tenant over full pages of committed tokens.  The key of an entry is (its parent's
serial number, its tokens' bytes), so a hit compares the tokens themselves and never trusts a hash;
below the root stands the tenant with the adapter instead of a serial, so no tenant and no adapter
finds what others have computed.
An entry has a page in each group of layers.  Pages without holders are evicted least recently used,
those of one group whatever becomes of the others'; a sequence lets go of its last page first, so
children go before their parents.  Only where sequences release pages that left the window do
parents go first: their entries stay without a page as long as entries stand below them, for a
continuation needs the pages of the last window alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core import TokenArray
from cluster.engine.memory.kv_cache import Reach

# What an entry stands below: another entry, by its serial, or the root of a tenant's trie.
Parent = int | bytes


@dataclass(slots=True, eq=False)
class CachedPage:
    """serial: identifies this very prefix; never used again after the entry is gone.  pages: each
    group's, None where it was evicted.  num_children: entries right below it."""

    serial: int
    pages: list[int | None]
    key: tuple[Parent, bytes]
    num_children: int = 0


class PrefixCache:
    """Entries by key and by page."""

    def __init__(self, page_size: int, num_groups: int) -> None:
        self.page_size = page_size
        self._entries: dict[tuple[Parent, bytes], CachedPage] = {}
        self._by_serial: dict[Parent, CachedPage] = {}
        self._by_page: list[dict[int, CachedPage]] = [{} for _ in range(num_groups)]
        self._last_serial = 0

    def match(self, parent: Parent, tokens: TokenArray) -> list[CachedPage]:
        """The longest chain of entries below `parent` that stand for the start of `tokens`."""
        found: list[CachedPage] = []
        size = self.page_size
        for start in range(0, len(tokens) - size + 1, size):
            entry = self._entries.get((parent, tokens[start : start + size].tobytes()))
            if entry is None:
                break
            found.append(entry)
            parent = entry.serial
        return found

    def insert(
        self, parent: Parent, page_tokens: TokenArray, pages: Sequence[int | None]
    ) -> CachedPage:
        """Enter a held page of each group; the key must be absent, the parent present."""
        self._last_serial += 1
        entry = CachedPage(self._last_serial, [*pages], (parent, page_tokens.tobytes()))
        self._entries[entry.key] = entry
        self._by_serial[entry.serial] = entry
        for by_page, page in zip(self._by_page, pages, strict=True):
            if page is not None:
                by_page[page] = entry
        if not isinstance(parent, bytes):
            self._by_serial[parent].num_children += 1
        return entry

    def restore(self, entry: CachedPage, group: int, page: int) -> None:
        """Give a held page to an entry that has none in that group."""
        entry.pages[group] = page
        self._by_page[group][page] = entry

    def has(self, group: int, page: int) -> bool:
        """True if an entry has the page."""
        return page in self._by_page[group]

    def forget(self, group: int, page: int) -> None:
        """Forget a page, and from its entry upwards the entries that no page and no child needs."""
        found = self._by_page[group].pop(page)
        found.pages[group] = None
        entry: CachedPage | None = found
        while entry is not None and not entry.num_children and set(entry.pages) == {None}:
            del self._entries[entry.key], self._by_serial[entry.serial]
            entry = self._by_serial.get(entry.key[0])
            if entry is not None:
                entry.num_children -= 1


def num_usable(entries: Sequence[CachedPage], first: int, reaches: Sequence[Reach]) -> int:
    """How many of a chain's entries can be continued from: those that end with all the pages that
    are read from there on.  first: the chain begins with so many pages that are held."""
    usable = 0
    present_from = [first] * len(reaches)
    for number, entry in enumerate(entries, first):
        end = number + 1
        is_usable = True
        for group, reach in enumerate(reaches):
            if entry.pages[group] is None:
                present_from[group] = end
            needed = max(reach.first_page(end * reach.page_size), first)
            is_usable &= needed >= present_from[group]
        if is_usable:
            usable = end - first
    return usable


class PagePool:
    """The pages of one of the groups that share a prefix cache, each in one of three states.

    free   nobody knows it
    held   so many `holders`, which are sequences, use it; it may be in the prefix cache as well
    idle   only the prefix cache keeps it; taken back, least recently used first, when needed

    Low numbers are allocated first, which keeps the touched memory small.
    """

    def __init__(self, num_pages: int, prefix_cache: PrefixCache, group: int) -> None:
        self.num_pages = num_pages
        self._prefix_cache = prefix_cache
        self._group = group
        self._free = bytearray(b"\x01" * num_pages)
        self.num_free = num_pages
        self.holders = [0] * num_pages
        self._idle: dict[int, None] = {}  # the least recently used first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free - self.num_idle

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_idle

    def allocate(self) -> int:
        """The lowest free page, with one holder.  Needs num_available > 0."""
        if self.num_free == 0:
            self._take_back()
        page = self._free.find(1)
        self._free[page] = 0
        self.num_free -= 1
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Count one more holder of a page that is held or idle."""
        if self.holders[page] == 0:
            del self._idle[page]
        self.holders[page] += 1

    def drop(self, page: int) -> None:
        """Count one holder less; the last one's page becomes idle where it is cached, else free."""
        self.holders[page] -= 1
        assert self.holders[page] >= 0, f"page {page} was dropped more often than held"
        if self.holders[page] > 0:
            return
        if self._prefix_cache.has(self._group, page):
            self._idle[page] = None
        else:
            self._set_free(page)

    def clear_idle(self) -> None:
        """Free every page that only the prefix cache keeps."""
        while self._idle:
            self._take_back()

    def _take_back(self) -> None:
        """Free the idle page that was used least recently."""
        page = next(iter(self._idle))
        del self._idle[page]
        self._prefix_cache.forget(self._group, page)
        self._set_free(page)

    def _set_free(self, page: int) -> None:
        self._free[page] = 1
        self.num_free += 1
