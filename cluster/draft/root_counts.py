"""How often growth between rounds paid off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RootCounts:
    """Commits that found a tree, and those of them that ended on a node expanded before (hits).

    After a hit the next tree is ready at once; after a miss a pass must run first.
    """

    hits: int = 0
    commits: int = 0

    def record(self, *, hit: bool) -> None:
        self.commits += 1
        self.hits += hit
