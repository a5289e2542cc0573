"""The KV cache's memory: slots that hold the keys and values of one token in every layer.

A slot is `page * page_size + offset` in the pool of a group of layers (`memory/reach.py`).  In each
pool one more page than asked for is allocated; its first slot is scratch: padding rows write there,
and padding keys, always masked, are read from there.  That page also stands for those a sequence
has let go of.  On a CPU a page takes memory once something is written to it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from cluster.engine.device import zeros_in_huge_pages
from cluster.engine.types import LayerSpec
from cluster.records import frozen
from cluster.spec.transfer import sent

# How far back layers look, and so which pages of a sequence they can still read.
#
# Where a layer has a sliding window, what lies before it is read by no row to come, and its pages
# can be let go; layers with full attention read every page. Layers of these two kinds are two
# groups: each has its own page table in every sequence and its own pool of pages, so that one
# lets go of what the other keeps. A model of one kind has one group.


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

    @property
    def kernel(self) -> int:
        """The size of the longest convolution's kernel; 0 where there is none."""
        return max((each.window or 0 for each in self.layers if each.is_convolution), default=0)

    def bytes_per_page(self, device: torch.device | None = None) -> int:
        """KV bytes of one page over the group's layers of this process (on that device)."""
        return self.reach.page_size * sum(
            2 * layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize
            for layer in self.layers
            if device in (None, layer.device)
        )


def layer_groups(layers: Sequence[LayerSpec], page_size: int) -> tuple[LayerGroup, ...]:
    """The layers with full attention, then those with a window; one group where all are alike.
    Those that share another's keys and values are in none."""
    kinds: tuple[list[int], list[int]] = ([], [])
    for index, layer in enumerate(layers):
        if layer.shared_with is None:
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


log = logging.getLogger(__name__)


class KVCache:
    """Per layer one tensor [slots, 2, kv_heads, head_dim] (keys, then values).

    num_pages: of each group, without the scratch page, whose number it is.
    Layers of one group and equal shape, dtype and device are views of one tensor, so that tokens
    move in all of them by one indexed copy.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_pages: Sequence[int],
        page_size: int,
        num_states: int = 0,
    ) -> None:
        """num_pages: of each group of layers, in the order of `layer_groups`.  num_states: places
        for the matrices of layers that have one; that of no token stays in the first."""
        self.num_states = num_states
        self.states = {  # by layer
            index: _zeros((num_states, *layer.state), torch.float32, layer.device)
            for index, layer in enumerate(layers)
            if layer.state is not None
        }
        self.page_size = page_size
        self.num_pages = tuple(num_pages)
        self.groups = layer_groups(layers, page_size)
        self.group_of = [0] * len(layers)  # by layer
        self._stacks: list[list[torch.Tensor]] = []  # by group
        # Moves that are still to be made, by group: to where and from where.
        self._moves: list[dict[int, int]] = [{} for _ in self.groups]
        by_layer: dict[int, torch.Tensor] = {}
        for number, (group, pages) in enumerate(zip(self.groups, num_pages, strict=True)):
            num_slots = (pages + 1) * page_size
            alike: dict[LayerSpec, list[int]] = {}
            for index in group.indices:
                self.group_of[index] = number
                # What is equal but for the window can be one tensor.
                alike.setdefault(replace(layers[index], window=None), []).append(index)
            self._stacks.append([])
            for spec, members in alike.items():
                shape = (len(members), num_slots, 2, spec.num_kv_heads, spec.head_dim)
                # Zeros, so that a masked key is a finite number (0 * NaN would not be 0).
                stack = _zeros(shape, spec.dtype, spec.device)
                self._stacks[-1].append(stack)
                by_layer.update(zip(members, stack.unbind(0), strict=True))
        for index, layer in enumerate(layers):
            if layer.shared_with is not None:
                by_layer[index] = by_layer[layer.shared_with]
                self.group_of[index] = self.group_of[layer.shared_with]
        self.layers = [by_layer[index] for index in range(len(layers))]
        log.info("kv cache pages=%s bytes=%d", self.num_pages, self.num_bytes)

    def first(self, num_layers: int) -> KVCache:
        """The first layers' part of it, in the same memory and the same groups."""
        part = copy.copy(self)
        part.layers, part.group_of = self.layers[:num_layers], self.group_of[:num_layers]
        return part

    @property
    def num_bytes(self) -> int:
        """The memory that it takes once all of it has been used."""
        pages = sum(stack.nbytes for stacks in self._stacks for stack in stacks)
        return pages + sum(each.nbytes for each in self.states.values())

    @property
    def scratch_slots(self) -> list[int]:
        return [pages * self.page_size for pages in self.num_pages]

    def move(self, group: int, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy slots to slots in all layers of a group, once `settle` is called; the two sets may
        overlap."""
        moves = self._moves[group]
        if not (moves.keys().isdisjoint(destination) and moves.keys().isdisjoint(source)):
            self.settle()  # what is moved again has to be there
        moves.update(zip(destination, source, strict=True))

    def settle(self) -> None:
        """Make the moves that were asked for, all at once; to be called before anyone reads or
        writes what the slots hold."""
        for stacks, moves in zip(self._stacks, self._moves, strict=True):
            if not moves:
                continue
            slots = np.array([[*moves.values()], [*moves]])
            moves.clear()
            by_device = {each: sent(slots, each) for each in {stack.device for stack in stacks}}
            for stack in stacks:
                source, destination = by_device[stack.device]
                # index_select copies before anything is written, so overlaps are harmless.
                stack.index_copy_(1, destination, stack.index_select(1, source))


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return zeros_in_huge_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
