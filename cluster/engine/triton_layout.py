"""A Batch as the int32 words that the Triton kernels read: tiles of rows, items of work.

One array holds everything, so that one transfer per step brings it to a device.  The fields of
items and tiles are described in `cluster.engine.triton_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.engine.batch import Batch, Share

Words = npt.NDArray[np.int32]

# Sections start at multiples of 64 bytes, so that loads of a row's words are aligned.
_ALIGNMENT = 16
_BITS_PER_WORD = 32
_NO_WORDS: Words = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut.

    rows_per_tile: rows of one sequence that one program attends.  block_keys: keys per iteration.
    num_kv_heads: programs per item.  num_programs: how many keep the device busy.
    """

    rows_per_tile: int
    block_keys: int
    num_kv_heads: int
    num_programs: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """words: the items first, then the sections that start where the other fields say.

    trees: whether any row is a node.  num_partials: partial results of the tiles that are split.
    """

    words: Words
    num_items: int
    num_split_tiles: int
    num_partials: int
    tiles: int
    positions: int
    slots: int
    bits: int
    node_positions: int
    split_tiles: int
    trees: bool


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows [row_start, row_stop) of a share (None: padding rows, which see no key)."""

    share: Share | None
    row_start: int
    row_stop: int
    key_stop: int


def lay_out(batch: Batch, tiling: Tiling) -> Layout:
    """Cut the batch's rows into tiles and the tiles' keys into items."""
    tiles = [*_tiles(batch.shares, tiling.rows_per_tile), *_padding_tiles(batch, tiling)]
    items, partials, split = _items(tiles, tiling)
    sections = [
        items,
        _tile_words(tiles, batch.shares, partials),
        _positions(batch),
        _concatenated([share.slots for share in batch.shares]),
        _concatenated([_packed(share.node_mask) for share in batch.shares]),
        _concatenated([share.node_positions for share in batch.shares]),
        np.array(split, np.int32),
    ]
    lengths = [-(-len(section) // _ALIGNMENT) * _ALIGNMENT for section in sections]
    starts = np.cumsum([0, *lengths]).tolist()
    words = np.zeros(max(starts[-1], 1), np.int32)
    for start, section in zip(starts, sections, strict=False):
        words[start : start + len(section)] = section
    return Layout(
        words=words,
        num_items=len(items) // 4,
        num_split_tiles=len(split),
        num_partials=sum(count for _, count in partials),
        tiles=starts[1],
        positions=starts[2],
        slots=starts[3],
        bits=starts[4],
        node_positions=starts[5],
        split_tiles=starts[6],
        trees=any(len(share.node_mask) for share in batch.shares),
    )


def _tiles(shares: Sequence[Share], rows_per_tile: int) -> Iterator[_Tile]:
    for share in shares:
        for start in range(0, share.num_rows, rows_per_tile):
            stop = min(start + rows_per_tile, share.num_rows)
            # Rows of the delta see no key behind the last of them; nodes may see any node.
            of_delta = stop <= share.num_delta
            key_stop = int(share.positions[stop - 1]) + 1 if of_delta else share.key_len
            yield _Tile(share, start, stop, key_stop)


def _padding_tiles(batch: Batch, tiling: Tiling) -> Iterator[_Tile]:
    """Padding rows have tiles too, so that their output is written: zeros."""
    first = batch.shares[-1].row_stop if batch.shares else 0
    for start in range(first, batch.num_rows, tiling.rows_per_tile):
        yield _Tile(None, start, min(start + tiling.rows_per_tile, batch.num_rows), 0)


def _items(
    tiles: Sequence[_Tile], tiling: Tiling
) -> tuple[Words, list[tuple[int, int]], list[int]]:
    """The items' words, each tile's (first partial, partials), and the tiles that are split.

    Every item has the same number of keys, so long contexts get more of them and all programs
    take equally long.
    """
    total = sum(tile.key_stop for tile in tiles) * tiling.num_kv_heads
    blocks = -(-total // (tiling.num_programs * tiling.block_keys))
    keys_per_item = max(blocks, 1) * tiling.block_keys
    items: list[int] = []
    partials: list[tuple[int, int]] = []
    split: list[int] = []
    num_partials = 0
    for index, tile in enumerate(tiles):
        count = -(-tile.key_stop // keys_per_item)
        if count <= 1:
            items += (index, 0, tile.key_stop, -1)
            partials.append((0, 0))
            continue
        for part in range(count):
            start = part * keys_per_item
            stop = min(start + keys_per_item, tile.key_stop)
            items += (index, start, stop, num_partials + part)
        partials.append((num_partials, count))
        split.append(index)
        num_partials += count
    return np.array(items, np.int32), partials, split


def _tile_words(
    tiles: Sequence[_Tile], shares: Sequence[Share], partials: Sequence[tuple[int, int]]
) -> Words:
    starts: dict[int, tuple[int, int, int]] = {}
    slots = bits = node_positions = 0
    for share in shares:
        starts[id(share)] = (slots, bits, node_positions)
        slots += share.key_len
        bits += len(share.node_mask) * _words_per_row(share.node_mask)
        node_positions += len(share.node_positions)
    rows: list[int] = []
    for tile, (first_partial, num_partials) in zip(tiles, partials, strict=True):
        own, num_rows = tile.share, tile.row_stop - tile.row_start
        if own is None:
            rows += (tile.row_start, num_rows, 0, 0, 0, 0, 0, first_partial, num_partials)
            continue
        slots, bits, node_positions = starts[id(own)]
        words_per_row = _words_per_row(own.node_mask)
        # Where the tile's first row would stand; rows of the delta have no words and read none.
        first_bits = bits + (tile.row_start - own.num_delta) * words_per_row
        rows += (
            own.row_start + tile.row_start, num_rows, slots, own.context_len, first_bits,
            words_per_row, node_positions, first_partial, num_partials,
        )  # fmt: skip
    return np.array(rows, np.int32)


def _positions(batch: Batch) -> Words:
    """Each row's position; -1 for padding, which is before every key."""
    # The shares' own: the batch's are cut off at the context limit.
    positions = np.full(batch.num_rows, -1, np.int32)
    for share in batch.shares:
        positions[share.row_start : share.row_stop] = share.positions
    return positions


def _words_per_row(mask: npt.NDArray[np.bool_]) -> int:
    num_nodes: int = mask.shape[1]
    return -(-num_nodes // _BITS_PER_WORD)


def _packed(mask: npt.NDArray[np.bool_]) -> Words:
    """bool[rows, nodes] -> int32[rows * words], node j in bit j % 32 of word j // 32."""
    padded = np.zeros((len(mask), _words_per_row(mask) * _BITS_PER_WORD), np.bool_)
    padded[:, : mask.shape[1]] = mask
    packed = np.packbits(padded, axis=1, bitorder="little")
    return packed.reshape(-1).view(np.dtype("<i4")).astype(np.int32, copy=False)


def _concatenated(parts: Sequence[npt.NDArray[np.generic]]) -> Words:
    return np.concatenate(parts).astype(np.int32) if parts else _NO_WORDS
