"""Which pages of a group of layers are free, held by sequences, or kept only by the prefix cache.

Every page is in exactly one of the three states:
    free      nobody knows it
    held      `holders` sequences use it; it may be in the prefix cache as well
    idle      only the prefix cache keeps it; taken back, least recently used first, when needed
"""

from __future__ import annotations

from cluster.engine.memory.prefix_cache import PrefixCache


class PagePool:
    """Counts holders of pages; allocation prefers neighbours and low numbers.

    A sequence whose pages are consecutive is attended without gathering, and low numbers keep the
    touched memory small.  group: whose pages they are, of the groups that share a prefix cache.
    """

    def __init__(self, num_pages: int, prefix_cache: PrefixCache, group: int = 0) -> None:
        self.num_pages = num_pages
        self._prefix_cache = prefix_cache
        self._group = group
        self._free = bytearray(b"\x01" * num_pages)
        self.num_free = num_pages
        self._holders = [0] * num_pages

    @property
    def num_idle(self) -> int:
        return self._prefix_cache.num_idle(self._group)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_free - self.num_idle

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_idle

    def allocate(self, after: int = -1) -> int:
        """A page with one holder, `after + 1` where that is free.  Needs num_available > 0."""
        if self.num_free == 0:
            page = self._prefix_cache.evict(self._group)
            self._holders[page] = 1
            return page
        page = after + 1
        if page >= self.num_pages or not self._free[page]:
            page = self._free.find(1)
        self._free[page] = 0
        self.num_free -= 1
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Count one more holder of a page that is held or idle."""
        if self._holders[page] == 0:
            self._prefix_cache.wake(self._group, page)
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """Count one holder less; the last one's page becomes idle where it is cached, else free."""
        self._holders[page] -= 1
        assert self._holders[page] >= 0, f"page {page} was dropped more often than held"
        if self._holders[page] > 0:
            return
        if not self._prefix_cache.rest(self._group, page):
            self._free[page] = 1
            self.num_free += 1

    def num_holders(self, page: int) -> int:
        return self._holders[page]

    def clear_idle(self) -> None:
        """Free every page that only the prefix cache keeps."""
        for page in self._prefix_cache.clear(self._group):
            self._free[page] = 1
            self.num_free += 1

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Raise AssertionError unless the counts agree with `holders`, page to sequences."""
        for page, count in enumerate(self._holders):
            assert count == holders.get(page, 0), f"page {page}: {count} holders recorded"
            idle = self._prefix_cache.is_idle(self._group, page)
            states = (bool(self._free[page]), idle, count > 0)
            assert sum(states) == 1, f"page {page} is in states free, idle, held: {states}"
        assert self.num_free == self._free.count(1), "the free count is wrong"
