"""A Batch as the int32 words that the Triton kernels read: tiles of rows, items of work.

One array holds everything, so that one transfer per step brings it to a device.  The fields of
items and tiles are described in `cluster.engine.attention.triton.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.engine.schedule.batch import Batch, Share
from cluster.records import frozen, record

Words = npt.NDArray[np.int32]

# Sections start at multiples of 64 bytes, so that loads of a row's words are aligned.
_ALIGNMENT = 16
_BITS_PER_WORD = 32
# As in `cluster.engine.attention.triton.kernels`, whose constants are Triton's.
_ITEM_WORDS, _TILE_WORDS, _SPLIT_WORDS = 4, 9, 2
# Of an item whose tile has several: writing and adding up a partial result takes as long as
# attending to some dozens of keys.
_MIN_SPLIT_KEYS = 256


@frozen
class Tiling:
    """How the work is cut.

    rows_per_tile: rows of one sequence that one program attends.  block_keys: keys per iteration.
    num_kv_heads: programs per item.  num_programs: how many keep the device busy.
    """

    rows_per_tile: int
    block_keys: int
    num_kv_heads: int
    num_programs: int


@frozen
class Frame:
    """How many entries each section of fixed place has room for; the launch grids follow from it.

    num_partials: partial results of the tiles that are split.  The words are the items,
    then the sections that start at the properties below, each behind the one before; from `rest` on
    slots, visibility and node positions of the shares stand, to which the tiles point, so that no
    context and no tree moves what stands before them.
    """

    num_items: int
    num_tiles: int
    num_rows: int
    num_split_rows: int
    num_partials: int

    @classmethod
    def holding(cls, num_rows: int, tiling: Tiling) -> Frame:
        """Room for whatever batch of `num_rows` rows, padding included, its contexts any length."""
        # Every tile has a row of its own: there are at most `num_rows`.  An item's keys are at
        # least all tiles' keys * num_kv_heads / num_programs (`_items`), so that all keys make up
        # at most x = num_programs / num_kv_heads items.  A tile's share of x, rounded up and at
        # least 1, is its number of items: together x + tiles.  Split are those whose share is above
        # 1: fewer than x of them, which have less than x + as many items.
        whole = tiling.num_programs // tiling.num_kv_heads
        num_split = min(num_rows, whole)
        return cls(
            num_items=num_rows + whole,
            num_tiles=num_rows,
            num_rows=num_rows,
            num_split_rows=min(num_rows, num_split * tiling.rows_per_tile),
            num_partials=whole + num_split,
        )

    @property
    def tiles(self) -> int:
        return _aligned(self.num_items * _ITEM_WORDS)

    @property
    def positions(self) -> int:
        # One tile more than there are: nobody's, of no rows, at which idle entries point.
        return self.tiles + _aligned((self.num_tiles + 1) * _TILE_WORDS)

    @property
    def split_rows(self) -> int:
        return self.positions + _aligned(self.num_rows)

    @property
    def rest(self) -> int:
        return self.split_rows + _aligned(self.num_split_rows * _SPLIT_WORDS)


@record
class Layout:
    """A step's words, and where in them what stands."""

    frame: Frame
    words: Words


@frozen
class _Tile:
    """Rows [row_start, row_stop) of a share (None: padding rows, which see no key)."""

    share: Share | None
    row_start: int
    row_stop: int
    key_stop: int


def lay_out(
    batch: Batch, tiling: Tiling, frame: Frame | None = None, out: Words | None = None
) -> Layout:
    """Cut the batch's rows into tiles and the tiles' keys into items.

    frame: `Frame.holding` the batch, for launches that were fixed before; None: just what it needs.
    out: where the words go, at least `num_words` of them; None: memory of their own.
    """
    tiles = [*_tiles(batch.shares, tiling.rows_per_tile), *_padding_tiles(batch, tiling)]
    items, partials = _items(tiles, tiling)
    split_rows = _split_rows(tiles, partials)
    if frame is None:
        frame = Frame(
            num_items=len(items) // _ITEM_WORDS,
            num_tiles=len(tiles),
            num_rows=batch.num_rows,
            num_split_rows=len(split_rows) // _SPLIT_WORDS,
            num_partials=sum(count for _, count in partials),
        )
    length = num_words(batch, frame)
    words = (np.empty(length, np.int32) if out is None else out)[:length]
    words[: frame.rest] = 0
    nobody = frame.num_tiles
    _put(words[: frame.num_items * _ITEM_WORDS], items, (nobody, 0, 0, -1))
    tile_words = _tile_words(tiles, batch.shares, partials, frame.rest)
    words[frame.tiles : frame.tiles + len(tile_words)] = tile_words
    words[frame.positions : frame.positions + batch.num_rows] = _positions(batch)
    split_end = frame.split_rows + frame.num_split_rows * _SPLIT_WORDS
    _put(words[frame.split_rows : split_end], split_rows, (nobody, 0))
    if batch.shares:
        np.concatenate(_rest(batch.shares), out=words[frame.rest :], casting="same_kind")
    return Layout(frame, words)


def num_words(batch: Batch, frame: Frame) -> int:
    """How many words `lay_out` makes of the batch in this frame."""
    return frame.rest + sum(
        share.key_len + _num_bit_words(share) + len(share.node_positions) for share in batch.shares
    )


def _put(section: Words, entries: Words, idle: tuple[int, ...]) -> None:
    """Fill a section with its entries, the room behind them with idle ones."""
    section[: len(entries)] = entries
    section[len(entries) :].reshape(-1, len(idle))[:] = idle


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


def _items(tiles: Sequence[_Tile], tiling: Tiling) -> tuple[Words, list[tuple[int, int]]]:
    """The items' words, and each tile's (first partial, partials): none where it is not split.

    Every item has the same number of keys, so long contexts get more of them and all programs
    take equally long.
    """
    total = sum(tile.key_stop for tile in tiles) * tiling.num_kv_heads
    blocks = -(-total // (tiling.num_programs * tiling.block_keys))
    fewest = -(-_MIN_SPLIT_KEYS // tiling.block_keys)
    keys_per_item = max(blocks, fewest) * tiling.block_keys
    items: list[int] = []
    partials: list[tuple[int, int]] = []
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
        num_partials += count
    return np.array(items, np.int32), partials


def _split_rows(tiles: Sequence[_Tile], partials: Sequence[tuple[int, int]]) -> Words:
    """The rows whose partial results are to be added up."""
    rows: list[int] = []
    for index, (tile, (_, count)) in enumerate(zip(tiles, partials, strict=True)):
        if count:
            for row in range(tile.row_stop - tile.row_start):
                rows += (index, row)
    return np.array(rows, np.int32)


def _rest(shares: Sequence[Share]) -> list[npt.NDArray[np.signedinteger[Any]]]:
    """The words that tiles point to, in the order of `_tile_words`."""
    return [
        *(share.slots for share in shares),
        *(_packed(share.node_mask) for share in shares),
        *(share.node_positions for share in shares),
    ]


def _tile_words(
    tiles: Sequence[_Tile],
    shares: Sequence[Share],
    partials: Sequence[tuple[int, int]],
    rest: int,
) -> Words:
    starts: dict[int, tuple[int, int, int]] = {}
    slots = rest
    bits = slots + sum(share.key_len for share in shares)
    node_positions = bits + sum(_num_bit_words(share) for share in shares)
    for share in shares:
        starts[id(share)] = (slots, bits, node_positions)
        slots += share.key_len
        bits += _num_bit_words(share)
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
            own.row_start + tile.row_start,
            num_rows,
            slots,
            own.context_len,
            first_bits,
            words_per_row,
            node_positions,
            first_partial,
            num_partials,
        )
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


def _num_bit_words(share: Share) -> int:
    return len(share.node_mask) * _words_per_row(share.node_mask)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
