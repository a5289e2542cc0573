"""How far back a model looks, and so which pages of a sequence it can still read.

Where every layer has a sliding window, what lies before the largest of them is read by no row to
come, and its pages are let go.  Models that mix windows with full attention keep all pages: all
layers share one table of pages, and the full layers read everything.  To spare these too would take
a table and a pool of pages for each kind of window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.engine.types import LayerSpec


@dataclass(frozen=True, slots=True)
class Reach:
    """window: the largest of all layers, None where any layer has none."""

    window: int | None
    page_size: int

    @classmethod
    def of(cls, layers: Iterable[LayerSpec], page_size: int) -> Reach:
        windows = [layer.window for layer in layers]
        known = [window for window in windows if window is not None]
        return cls(max(known) if known and len(known) == len(windows) else None, page_size)

    def first_page(self, length: int) -> int:
        """The first page that rows at position `length` and behind it read.

        One key more than they see is kept, so that the page before `length` always is."""
        if self.window is None:
            return 0
        return max(0, length - self.window) // self.page_size

    def first_page_kept(self, length: int) -> int:
        """The first page that a sequence of `length` committed tokens keeps: those that it reads,
        and one for a short rollback."""
        return self.first_page(length - self.page_size)

    def most_pages(self, length: int, num_rows: int) -> int:
        """The most pages a sequence holds until it has come to `length` tokens and nodes, where it
        never has more than `num_rows` beyond those that are committed."""
        pages = -(-length // self.page_size)
        if self.window is None:
            return pages
        # Beyond the window and the rows: what the first page holds before it, the one for
        # rollbacks, and the copy of a page that others share.
        return min(pages, -(-(self.window + num_rows) // self.page_size) + 3)
