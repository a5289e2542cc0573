"""One request in the engine: its tokens, where they lie in the pages of each group of layers, its
live nodes."""

from __future__ import annotations

from collections.abc import Sequence as Indices
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_TREE, TokenArray, TokenTree, token_array
from cluster.engine.memory.prefix_cache import CachedPage, Parent
from cluster.engine.work import Work
from cluster.spec.token_log import TokenLog

Slots = npt.NDArray[np.int64]
NO_SLOTS: Slots = np.empty(0, np.int64)
_INITIAL_CAPACITY = 256


@dataclass(slots=True, eq=False)
class PageTable:
    """pages: the block table; token i lies in page i // page_size.

    num_released: so many pages at the front have left the window of the group's layers; the scratch
    page stands for them.
    """

    page_size: int
    pages: list[int] = field(default_factory=list)
    num_released: int = 0
    _slots: Slots = field(default_factory=lambda: np.empty(_INITIAL_CAPACITY, np.int64))

    @property
    def slots(self) -> Slots:
        """int64[len(pages) * page_size], slot by position; a view."""
        return self._slots[: len(self.pages) * self.page_size]

    @property
    def held_pages(self) -> list[int]:
        """The pages that are the sequence's own or shared by it, in order."""
        return self.pages[self.num_released :]

    def add(self, page: int) -> None:
        start = len(self.pages) * self.page_size
        stop = start + self.page_size
        if stop > len(self._slots):
            slots = np.zeros(max(stop, 2 * len(self._slots)), dtype=np.int64)
            slots[: len(self._slots)] = self._slots
            self._slots = slots
        self.pages.append(page)
        self._write_slots(len(self.pages) - 1)

    def add_released(self, scratch_page: int) -> None:
        """Add a page that nothing will read; all before it have been released."""
        self.add(scratch_page)
        self.num_released += 1

    def release(self, scratch_page: int) -> int:
        """Let the scratch page stand for the first page that is held; returns that one."""
        self.num_released += 1
        return self.replace(self.num_released - 1, scratch_page)

    def pop(self) -> int | None:
        """Take the last page off the table and return it; None where it was released."""
        page = self.pages.pop()
        if len(self.pages) >= self.num_released:
            return page
        self.num_released = len(self.pages)
        return None

    def replace(self, index: int, page: int) -> int:
        """Put `page` into the table; returns the one that stood there."""
        former, self.pages[index] = self.pages[index], page
        self._write_slots(index)
        return former

    def _write_slots(self, index: int) -> None:
        first = self.pages[index] * self.page_size
        start = index * self.page_size
        self._slots[start : start + self.page_size] = np.arange(first, first + self.page_size)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's state.

    arrival: grows with first submissions; a lower one has the right of way, and keeps it through
    preemption.  tables: of each group of layers one, all of as many pages.  Nodes follow the
    context: node j lies at position cached_len + j of the same tables.
    shared: the prefix-cache entries of the first len(shared) pages; these pages are read-only.
    tenant, adapter: whose prefixes it shares.
    border, state: so many tokens, whole pages, have their matrices at that place; 0 = at the text's
    beginning.  spare: the place for those of the next border; 0 = none yet.
    work: submitted and not answered yet.  is_open: it was checked against the cache, so that the
    sequence holds a prefix of its context from here on.  num_adopted: tokens of that prefix that
    the prefix cache had.
    known_len: tokens of its work that others have computed, though not all is kept of them.
    """

    request_id: str
    arrival: int
    page_size: int
    num_tables: int = 1
    tables: list[PageTable] = field(init=False)
    shared: list[CachedPage] = field(default_factory=list)
    tree: TokenTree = EMPTY_TREE  # the live nodes; all of them hold KV
    work: Work | None = None
    is_open: bool = False
    num_adopted: int = 0
    tenant: bytes = b""
    adapter: int = 0
    border: int = 0
    state: int = 0
    spare: int = 0
    known_len: int = 0
    _log: TokenLog = field(default_factory=TokenLog)

    def __post_init__(self) -> None:
        self.tables = [PageTable(self.page_size) for _ in range(self.num_tables)]

    @property
    def cached_len(self) -> int:
        """Committed tokens that hold KV."""
        return len(self._log)

    @property
    def tokens(self) -> TokenArray:
        """int32[cached_len], the committed tokens; a view that the next step may overwrite."""
        return self._log.token_ids

    @property
    def num_pages(self) -> int:
        """Entries of each table."""
        return len(self.tables[0].pages)

    @property
    def prefix_end(self) -> Parent:
        """The parent of the prefix cache's entry of the next full page."""
        if self.shared:
            return self.shared[-1].serial
        # Indices of adapters are never given twice, so they may come to be many.
        return self.tenant + self.adapter.to_bytes(8, "little")

    @property
    def num_slots_used(self) -> int:
        return self.cached_len + len(self.tree)

    @property
    def num_delta_left(self) -> int:
        """Tokens of its work that the cache lacks."""
        assert self.work is not None
        return self.work.context_len - self.cached_len

    @property
    def num_rows_left(self) -> int:
        """Rows that its work still takes."""
        assert self.work is not None
        return self.num_delta_left + self.work.num_new_nodes

    def border_in(self, length: int) -> int:
        """The last border before the last of so many tokens: who begins with the same tokens can
        continue there, for it wants the logits behind the last one."""
        return max(self.border, (length - 1) // self.page_size * self.page_size)

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


def starts_with(sequence: Sequence, work: Work) -> bool:
    """True if the live nodes begin with the work's cached nodes."""
    count, live = work.num_cached_nodes, sequence.tree
    if count > len(live):
        return False
    return bool(
        np.array_equal(live.token_ids[:count], work.tree.token_ids[:count])
        and np.array_equal(live.parents[:count], work.tree.parents[:count])
    )


def kept_parents(tree: TokenTree, path: Indices[int], keep: Indices[int]) -> TokenArray:
    """The new parents of the nodes `keep` behind the nodes `path`, see `Engine.retain`."""
    parents = tree.parents.tolist()
    for before, node in pairwise((-1, *path)):
        assert parents[node] == before, f"{path} is no path from the context"
    assert list(keep) == sorted(set(keep)), f"{keep} are out of order"
    places = {path[-1] if path else -1: -1}
    places |= {node: index for index, node in enumerate(keep)}
    assert all(parents[node] in places for node in keep), f"some of {keep} hang loose"
    return token_array([places[parents[node]] for node in keep])
