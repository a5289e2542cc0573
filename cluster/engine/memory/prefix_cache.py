"""Finds the pages of a prefix that another sequence has already computed.

One trie per tenant over full pages of committed tokens.  The key of an entry is (its parent's
serial number, its tokens' bytes), so a hit compares the tokens themselves and never trusts a hash;
below the root stands the tenant instead of a serial, so no tenant finds what others have computed.
Pages without holders are evicted least recently used; a sequence lets go of its last page first, so
children go before their parents.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from cluster.core import TokenArray

# What an entry stands below: another entry, by its serial, or the root of a tenant's trie.
Parent = int | bytes


@dataclass(frozen=True, slots=True)
class CachedPage:
    """serial: identifies this very prefix; never used again after eviction."""

    serial: int
    page: int
    key: tuple[Parent, bytes]


class PrefixCache:
    """Entries by key and by page.  `enabled` False turns every operation into a miss."""

    def __init__(self, page_size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.page_size = page_size
        self._entries: dict[tuple[Parent, bytes], CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._last_serial = 0

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, parent: Parent, tokens: TokenArray) -> list[CachedPage]:
        """The longest chain of entries below `parent` whose pages hold the start of `tokens`."""
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
        """Enter a held page; the key must be absent."""
        self._last_serial += 1
        entry = CachedPage(self._last_serial, page, (parent, page_tokens.tobytes()))
        self._entries[entry.key] = entry
        self._by_page[page] = entry
        return entry

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
        entry = self._by_page.pop(page)
        del self._entries[entry.key]
        return page

    def clear(self) -> list[int]:
        """Forget all idle pages and return them."""
        return [self.evict() for _ in range(len(self._idle))]
