"""Finds the pages of a prefix that another sequence has already computed.

One trie per tenant over full pages of committed tokens.  The key of an entry is (its parent's
serial number, its tokens' bytes), so a hit compares the tokens themselves and never trusts a hash;
below the root stands the tenant instead of a serial, so no tenant finds what others have computed.
Pages without holders are evicted least recently used; a sequence lets go of its last page first, so
children go before their parents.  Only where sequences release pages that left the window do
parents go first: their entries stay without a page as long as entries stand below them, for a
continuation needs the pages of the last window alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core import TokenArray
from cluster.engine.memory.reach import Reach

# What an entry stands below: another entry, by its serial, or the root of a tenant's trie.
Parent = int | bytes


@dataclass(slots=True, eq=False)
class CachedPage:
    """serial: identifies this very prefix; never used again after the entry is gone.  page: None
    where it was evicted.  num_children: entries right below it."""

    serial: int
    page: int | None
    key: tuple[Parent, bytes]
    num_children: int = 0


class PrefixCache:
    """Entries by key and by page.  `enabled` False turns every operation into a miss."""

    def __init__(self, page_size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.page_size = page_size
        self._entries: dict[tuple[Parent, bytes], CachedPage] = {}
        self._by_serial: dict[Parent, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._last_serial = 0

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __len__(self) -> int:
        return len(self._entries)

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

    def find(self, parent: Parent, page_tokens: TokenArray) -> CachedPage | None:
        return self._entries.get((parent, page_tokens.tobytes()))

    def insert(self, parent: Parent, page_tokens: TokenArray, page: int) -> CachedPage:
        """Enter a held page; the key must be absent, the parent present."""
        self._last_serial += 1
        entry = CachedPage(self._last_serial, page, (parent, page_tokens.tobytes()))
        self._entries[entry.key] = entry
        self._by_serial[entry.serial] = entry
        self._by_page[page] = entry
        if not isinstance(parent, bytes):
            self._by_serial[parent].num_children += 1
        return entry

    def restore(self, entry: CachedPage, page: int) -> None:
        """Give a held page to an entry that has none."""
        entry.page = page
        self._by_page[page] = entry

    def rest(self, page: int) -> bool:
        """The last holder let go: keep the page as idle if it is cached, and say so."""
        if page not in self._by_page:
            return False
        self._idle[page] = None
        return True

    def wake(self, page: int) -> None:
        """An idle page gets a holder again."""
        del self._idle[page]

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def evict(self) -> int:
        """Forget the least recently used idle page and return it."""
        page, _ = self._idle.popitem(last=False)
        entry: CachedPage | None = self._by_page.pop(page)
        assert entry is not None
        entry.page = None
        while entry is not None and entry.page is None and not entry.num_children:
            entry = self._remove(entry)
        return page

    def _remove(self, entry: CachedPage) -> CachedPage | None:
        """Forget an entry; returns the one it stood below."""
        del self._entries[entry.key], self._by_serial[entry.serial]
        parent = self._by_serial.get(entry.key[0])
        if parent is not None:
            parent.num_children -= 1
        return parent

    def clear(self) -> list[int]:
        """Forget all idle pages and return them."""
        return [self.evict() for _ in range(len(self._idle))]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every entry is reachable and of use to some page."""
        children: dict[Parent, int] = {}
        for entry in self._entries.values():
            parent = entry.key[0]
            assert isinstance(parent, bytes) or parent in self._by_serial, "an entry hangs loose"
            children[parent] = children.get(parent, 0) + 1
            assert entry.page is None or self._by_page[entry.page] is entry, "two own one page"
        for entry in self._entries.values():
            count = children.get(entry.serial, 0)
            assert entry.num_children == count, f"{entry.num_children} children, of {count}"
            assert count or entry.page is not None, "an entry without page or children was kept"


def num_usable(entries: Sequence[CachedPage], first: int, reach: Reach) -> int:
    """How many of a chain's entries can be continued from: those that end with all the pages that
    are read from there on.  first: the chain begins with so many pages that are held."""
    usable = present_from = 0
    for index, entry in enumerate(entries):
        if entry.page is None:
            present_from = index + 1
        end = first + index + 1
        if max(reach.first_page(end * reach.page_size), first) >= first + present_from:
            usable = index + 1
    return usable
