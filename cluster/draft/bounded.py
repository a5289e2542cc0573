"""One thing per key, least recently used out.

Names of task classes and tenants come from clients, so their number is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

DEFAULT_BOUND = 256


def by_key(make: Callable[[], T], bound: int = DEFAULT_BOUND) -> Callable[[Hashable], T]:
    """Return what gives the thing of a key, made at the first time; the last `bound` are kept."""
    return lru_cache(bound)(lambda key: make())
