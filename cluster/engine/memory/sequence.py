"""One request in the engine: its tokens, its slots, its live nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core import EMPTY_TREE, TokenArray, TokenTree
from cluster.engine.memory.page_table import PageTable
from cluster.engine.memory.prefix_cache import CachedPage, Parent
from cluster.engine.work import Work
from cluster.spec.token_log import TokenLog

_INITIAL_CAPACITY = 256


@dataclass(slots=True, eq=False)
class Pending:
    """A submitted work.  opened: checked against the cache, so that the sequence holds a prefix of
    the work's context from here on.  num_adopted: tokens of that prefix that the prefix cache
    had."""

    work: Work
    opened: bool = False
    num_adopted: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's state.

    arrival: grows with first submissions; a lower one has the right of way, and keeps it through
    preemption.  tables: of each group of layers one, all of as many pages.  Nodes follow the
    context: node j lies at position cached_len + j of the same tables.
    shared: the prefix-cache entries of the first len(shared) pages; these pages are read-only.
    tenant, adapter: whose prefixes it shares.
    """

    request_id: str
    arrival: int
    page_size: int
    num_tables: int = 1
    tables: list[PageTable] = field(init=False)
    shared: list[CachedPage] = field(default_factory=list)
    tree: TokenTree = EMPTY_TREE  # the live nodes; all of them hold KV
    pending: Pending | None = None
    tenant: bytes = b""
    adapter: int = 0
    _log: TokenLog = field(default_factory=lambda: TokenLog(capacity=_INITIAL_CAPACITY))

    def __post_init__(self) -> None:
        self.tables = [PageTable(self.page_size) for _ in range(self.num_tables)]

    @property
    def num_adopted(self) -> int:
        """Tokens of the pending work that the prefix cache had."""
        return 0 if self.pending is None else self.pending.num_adopted

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
        return self.shared[-1].serial if self.shared else prefix_root(self.tenant, self.adapter)

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


def prefix_root(tenant: bytes, adapter: int) -> bytes:
    """The parent of the first pages of a tenant's texts, as an adapter computes them."""
    # Indices are never given twice, so they may come to be many.
    return tenant + adapter.to_bytes(8, "little")
