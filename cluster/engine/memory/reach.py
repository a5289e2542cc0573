"""How far back layers look, and so which pages of a sequence they can still read.

Where a layer has a sliding window, what lies before it is read by no row to come, and its pages can
be let go; layers with full attention read every page.  Layers of these two kinds are two groups:
each has its own page table in every sequence and its own pool of pages, so that one lets go of what
the other keeps.  A model of one kind has one group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.engine.types import LayerSpec
from cluster.records import frozen


@frozen
class Reach:
    """window: the largest of some layers, at least a page; None where they have none."""

    window: int | None
    page_size: int

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
        # rollbacks, and one to spare.
        return min(pages, -(-(self.window + num_rows) // self.page_size) + 3)


@frozen
class LayerGroup:
    """Layers whose pages are held and let go together.

    indices: of `layers` among all, ascending.  reach: the largest of theirs.
    """

    indices: tuple[int, ...]
    layers: tuple[LayerSpec, ...]
    reach: Reach

    def bytes_per_page(self, device: torch.device | None = None) -> int:
        """KV bytes of one page over the group's layers of this process (on that device)."""
        return self.reach.page_size * sum(
            2 * layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize
            for layer in self.layers
            if device in (None, layer.device)
        )


def layer_groups(layers: Sequence[LayerSpec], page_size: int) -> tuple[LayerGroup, ...]:
    """The layers with full attention, then those with a window; one group where all are alike."""
    kinds: tuple[list[int], list[int]] = ([], [])
    for index, layer in enumerate(layers):
        kinds[layer.window is not None].append(index)
    groups: list[LayerGroup] = []
    for indices in filter(None, kinds):
        members = tuple(layers[index] for index in indices)
        window = max((layer.window for layer in members if layer.window is not None), default=None)
        if window is not None:
            # So that a rollback into the last full page leaves the one before it, below whose entry
            # in the prefix cache the next one is to stand.
            window = max(window, page_size)
        groups.append(LayerGroup(tuple(indices), members, Reach(window, page_size)))
    return tuple(groups)
