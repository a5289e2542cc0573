"""Where a sequence's tokens lie in the pages of one group of layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
    _slots: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.empty(_INITIAL_CAPACITY, np.int64)
    )

    @property
    def slots(self) -> npt.NDArray[np.int64]:
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
