"""The books of an engine's pages: what is counted is what sequences and the prefix cache hold."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cluster.engine.memory.page_owners import PageOwners
from cluster.engine.memory.prefix_cache import PagePool, PrefixCache
from cluster.engine.memory.sequence import Sequence


def check_integrity(engine: Any) -> None:
    """engine: one with pages of its own."""
    check_pages(engine.page_owners)


def check_pages(owners: PageOwners) -> None:
    """Every page and every state is free, held as often as is counted, or kept by the prefix cache
    alone; and tables hold what their sequences read."""
    sequences = list(owners.sequences.values())
    for group, pool in enumerate(owners.pools):
        for each in sequences:
            _check_table(owners, each, group)
        held = (page for each in sequences for page in each.tables[group].held_pages)
        _check_pool(pool, Counter(held))
    states = [state for each in sequences for state in (each.state, each.spare) if state]
    first = [0] if owners.states.exist else []  # the state before any token is always held
    _check_pool(owners.states.pool, Counter([*first, *states]))
    for each in sequences:
        assert each.border <= each.cached_len, "a state of tokens that were taken back"
        assert bool(each.border) == bool(each.state), "a border without its state"
    _check_entries(owners._prefixes)


def _check_table(owners: PageOwners, sequence: Sequence, group: int) -> None:
    table, reach = sequence.tables[group], owners._reaches[group]
    held, first, size = table.held_pages, table.num_released, table.page_size
    assert len(table.pages) == sequence.num_pages, "the tables differ in length"
    assert sequence.num_slots_used <= len(table.pages) * size, "too few pages"
    assert len(set(held)) == len(held), "a page is held twice"
    assert set(table.pages[:first]) <= {owners._cache.num_pages[group]}, "not released"
    assert first <= reach.first_page(sequence.cached_len), "a page in sight was released"
    assert not owners.states.exist or first * size <= sequence.border, "its border's are gone"
    entries = owners._prefixes._by_serial
    for entry in sequence.shared:
        assert entries.get(entry.serial) is entry, "it shares what is gone"
    for entry, page in zip(sequence.shared[first:], held, strict=False):
        assert entry.pages[group] == page, "a shared page was replaced"


def _check_pool(pool: PagePool, holders: Mapping[int, int]) -> None:
    for page, count in enumerate(pool.holders):
        assert count == holders.get(page, 0), f"page {page}: {count} holders recorded"
        states = (bool(pool._free[page]), page in pool._idle, count > 0)
        assert sum(states) == 1, f"page {page} is in states free, idle, held: {states}"
    assert pool.num_free == pool._free.count(1), "the free count is wrong"


def _check_entries(prefixes: PrefixCache) -> None:
    entries = prefixes._entries.values()
    children = Counter(entry.key[0] for entry in entries)
    for entry in entries:
        parent = entry.key[0]
        assert isinstance(parent, bytes) or parent in prefixes._by_serial, "an entry hangs loose"
        for by_page, page in zip(prefixes._by_page, entry.pages, strict=True):
            assert page is None or by_page[page] is entry, "two own one page"
        assert entry.num_children == children[entry.serial], "children are counted wrongly"
        is_of_use = entry.num_children or any(page is not None for page in entry.pages)
        assert is_of_use, "an entry without page or children was kept"
