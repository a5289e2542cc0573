"""One thing per key, least recently used out.

Names of task classes and tenants come from clients, so their number is not trusted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

DEFAULT_BOUND = 256


class Bounded(Generic[T]):
    """A mapping that makes what it lacks and never exceeds `bound` entries."""

    def __init__(self, make: Callable[[], T], bound: int = DEFAULT_BOUND) -> None:
        self._make = make
        self._bound = bound
        self._entries: OrderedDict[Hashable, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries.values())

    def of(self, key: Hashable) -> T:
        """The entry of `key`, which is now the most recently used one."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._make()
            if len(self._entries) > self._bound:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        return entry
