"""What the engine knows of one request: its tokens, its slots, its live nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_TREE, TokenArray, TokenTree
from cluster.engine.memory.prefix_cache import CachedPage, Parent
from cluster.engine.work import Work
from cluster.token_log import TokenLog

_INITIAL_CAPACITY = 256


@dataclass(slots=True, eq=False)
class Pending:
    """A submitted work.  order: grows with every submission.  opened: checked against the cache,
    so that the sequence holds a prefix of the work's context from here on."""

    work: Work
    order: int
    opened: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's state.

    arrival: grows with first submissions; a lower one has the right of way, and keeps it through
    preemption.  pages: the block table; token i lies in page i // page_size.  Nodes follow the
    context: node j lies at position cached_len + j of the same table.
    num_released: so many pages at the front have left the window of every layer; the scratch page
    stands for them.
    shared: the prefix-cache entries of the first len(shared) pages; these pages are read-only.
    tenant: whose prefixes it shares.
    """

    request_id: str
    arrival: int
    page_size: int
    pages: list[int] = field(default_factory=list)
    num_released: int = 0
    shared: list[CachedPage] = field(default_factory=list)
    tree: TokenTree = EMPTY_TREE  # the live nodes; all of them hold KV
    pending: Pending | None = None
    tenant: bytes = b""
    _log: TokenLog = field(default_factory=lambda: TokenLog(capacity=_INITIAL_CAPACITY))
    _slots: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.empty(_INITIAL_CAPACITY, np.int64)
    )

    @property
    def cached_len(self) -> int:
        """Committed tokens that hold KV."""
        return len(self._log)

    @property
    def tokens(self) -> TokenArray:
        """int32[cached_len], the committed tokens; a view that the next step may overwrite."""
        return self._log.token_ids

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """int64[len(pages) * page_size], slot by position; a view."""
        return self._slots[: len(self.pages) * self.page_size]

    @property
    def held_pages(self) -> list[int]:
        """The pages that are its own or shared by it, in order."""
        return self.pages[self.num_released :]

    @property
    def prefix_end(self) -> Parent:
        """What the prefix cache's entry of the next full page stands below."""
        return self.shared[-1].serial if self.shared else self.tenant

    @property
    def num_slots_used(self) -> int:
        return self.cached_len + len(self.tree)

    def hash_at(self, length: int) -> int:
        """poly64 of the first `length` <= cached_len tokens."""
        return self._log.hash_at(length)

    def append(self, token_ids: TokenArray) -> None:
        """Commit tokens whose KV lies at the following positions; drops the nodes."""
        self._log.append(token_ids)
        self.tree = EMPTY_TREE

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens; drops the nodes."""
        self._log.truncate(length)
        self.tree = EMPTY_TREE

    def add_page(self, page: int) -> None:
        start = len(self.pages) * self.page_size
        stop = start + self.page_size
        if stop > len(self._slots):
            slots = np.zeros(max(stop, 2 * len(self._slots)), dtype=np.int64)
            slots[: len(self._slots)] = self._slots
            self._slots = slots
        self.pages.append(page)
        self._write_slots(len(self.pages) - 1)

    def add_released_page(self, scratch_page: int) -> None:
        """The same for a page that nothing will read; all before it have been released."""
        self.add_page(scratch_page)
        self.num_released += 1

    def release_page(self, scratch_page: int) -> int:
        """Let the scratch page stand for the first page that is held; returns that one."""
        self.num_released += 1
        return self.replace_page(self.num_released - 1, scratch_page)

    def pop_page(self) -> int | None:
        """Take the last page off the block table and return it; None where it was released."""
        page = self.pages.pop()
        if len(self.pages) >= self.num_released:
            return page
        self.num_released = len(self.pages)
        return None

    def replace_page(self, index: int, page: int) -> int:
        """Put `page` into the block table; returns the one that stood there."""
        former, self.pages[index] = self.pages[index], page
        self._write_slots(index)
        return former

    def _write_slots(self, index: int) -> None:
        first = self.pages[index] * self.page_size
        start = index * self.page_size
        self._slots[start : start + self.page_size] = np.arange(first, first + self.page_size)
