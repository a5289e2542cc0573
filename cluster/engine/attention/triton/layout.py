"""A Batch as the int32 words that the Triton kernels read: tiles of rows, items of work.

One array holds everything, so that one transfer per step brings it to a device.  The fields of
items and tiles are described in `cluster.engine.attention.triton.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.engine.attention.seam import Words
from cluster.engine.schedule.batch import Batch, Share
from cluster.records import frozen, record
from cluster.spec.tree import packed_bits

# Sections start at multiples of 64 bytes, so that loads of a row's words are aligned.
_ALIGNMENT = 16
_BITS_PER_WORD = 32
# As in `cluster.engine.attention.triton.kernels`, whose constants are Triton's.
_ITEM_WORDS, _TILE_WORDS, _SPLIT_WORDS = 4, 9, 2
_POINTERS = slice(2, 7, 2)  # of a tile's words
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


def lay_out(
    batch: Batch, tiling: Tiling, frame: Frame | None = None, out: Words | None = None
) -> Layout:
    """Cut the batch's rows into tiles and the tiles' keys into items.

    frame: `Frame.holding` the batch, for launches that were fixed before; None: just what it needs.
    out: where the words go, at least `num_words` of them; None: memory of their own.
    """
    tiles = _tiles(batch, tiling.rows_per_tile)
    items, partials = _items([tile[-1] for tile in tiles], tiling)
    split_rows = _split_rows([tile[1] for tile in tiles], partials)
    if frame is None:
        frame = Frame(
            num_items=len(items),
            num_tiles=len(tiles),
            num_rows=batch.num_rows,
            num_split_rows=len(split_rows),
            num_partials=sum(count for _, count in partials),
        )
    length = num_words(batch, frame)
    words = (np.empty(length, np.int32) if out is None else out)[:length]
    nobody = frame.num_tiles
    _put(words[: frame.num_items * _ITEM_WORDS], items, (nobody, 0, 0, -1))
    tile_words = words[frame.tiles :][: (nobody + 1) * _TILE_WORDS]
    entries = [(*tile[:-1], *own) for tile, own in zip(tiles, partials, strict=True)]
    _put(tile_words, entries, (0,) * _TILE_WORDS)
    tile_words.reshape(-1, _TILE_WORDS)[: len(tiles), _POINTERS] += frame.rest
    split_end = frame.split_rows + frame.num_split_rows * _SPLIT_WORDS
    _put(words[frame.split_rows : split_end], split_rows, (nobody, 0))
    positions = words[frame.positions :][: batch.num_rows]
    # Padding is before every key.
    positions[:] = -1
    shares = batch.shares
    if shares:
        # The shares' own positions: the batch's are cut off at the context limit.
        own = positions[: shares[-1].row_stop]
        np.concatenate([share.positions for share in shares], out=own, casting="same_kind")
        bits = [packed_bits(each.node_bits, 4 * _words_per_row(each)) for each in shares]
        rest = [*(share.slots for share in shares), np.frombuffer(b"".join(bits), "<i4")]
        rest += (share.node_positions for share in shares)
        np.concatenate(rest, out=words[frame.rest :], casting="same_kind")
    return Layout(frame, words)


def num_words(batch: Batch, frame: Frame) -> int:
    """How many words `lay_out` makes of the batch in this frame."""
    return frame.rest + sum(
        [
            len(share.slots)
            + len(share.node_bits) * _words_per_row(share)
            + len(share.node_positions)
            for share in batch.shares
        ]
    )


def _put(section: Words, entries: Sequence[tuple[int, ...]], idle: tuple[int, ...]) -> None:
    """Fill a section with its entries, the room behind them with idle ones."""
    table = section.reshape(-1, len(idle))
    table[len(entries) :] = idle
    if entries:
        table[: len(entries)] = entries


def _tiles(batch: Batch, rows_per_tile: int) -> list[tuple[int, ...]]:
    """Of each tile its words but the last two, with pointers from `Frame.rest` on, and the number
    of its keys."""
    shares = batch.shares
    slots, row = 0, 0
    bits = sum([len(share.slots) for share in shares])
    nodes = bits + sum([len(share.node_bits) * _words_per_row(share) for share in shares])
    tiles: list[tuple[int, ...]] = []
    for share in shares:
        row, num_rows, num_delta = share.row_start, len(share.positions), share.num_delta
        context_len, key_len, width = share.context_len, len(share.slots), _words_per_row(share)
        for start in range(0, num_rows, rows_per_tile):
            stop = min(start + rows_per_tile, num_rows)
            # Rows of the delta see no key behind the last of them; nodes may see any node.
            num_keys = context_len - num_delta + stop if stop <= num_delta else key_len
            # Where the tile's first row would stand; rows of the delta have no words and read none.
            first_bits = bits + (start - num_delta) * width
            places = (slots, context_len, first_bits, width, nodes)
            tiles.append((row + start, stop - start, *places, num_keys))
        slots += key_len
        bits += len(share.node_bits) * width
        nodes += len(share.node_positions)
        row += num_rows
    # Padding rows have tiles too, so that their output is written: zeros.
    for start in range(row, batch.num_rows, rows_per_tile):
        tiles.append((start, min(rows_per_tile, batch.num_rows - start), 0, 0, 0, 0, 0, 0))
    return tiles


def _items(
    key_counts: Sequence[int], tiling: Tiling
) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """The items' words, and each tile's (first partial, partials): none where it is not split.

    key_counts: of each tile.  Every item has the same number of keys, so long contexts get more of
    them and all programs take equally long.
    """
    blocks = -(-sum(key_counts) * tiling.num_kv_heads // (tiling.num_programs * tiling.block_keys))
    fewest = -(-_MIN_SPLIT_KEYS // tiling.block_keys)
    keys_per_item = max(blocks, fewest) * tiling.block_keys
    items: list[tuple[int, ...]] = []
    partials: list[tuple[int, int]] = []
    num_partials = 0
    for index, num_keys in enumerate(key_counts):
        if num_keys <= keys_per_item:
            items.append((index, 0, num_keys, -1))
            partials.append((0, 0))
            continue
        starts = range(0, num_keys, keys_per_item)
        for part, start in enumerate(starts, num_partials):
            items.append((index, start, min(start + keys_per_item, num_keys), part))
        partials.append((num_partials, len(starts)))
        num_partials += len(starts)
    return items, partials


def _split_rows(
    row_counts: Sequence[int], partials: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The rows whose partial results are to be added up, each with its tile before it."""
    return [
        (index, row)
        for index, (num_rows, (_, count)) in enumerate(zip(row_counts, partials, strict=True))
        if count
        for row in range(num_rows)
    ]


def _words_per_row(share: Share) -> int:
    return -(-len(share.node_positions) // _BITS_PER_WORD)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
