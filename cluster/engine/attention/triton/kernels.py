"""Paged tree attention for NVIDIA GPUs: two Triton kernels.

`attend_kernel` computes one item of work, a range of keys for a tile of rows of one sequence and
the query heads of one key head, so that each key is read once for all of them.  Where a tile's
keys are split over several items (flash-decoding; Dao et al. 2023), each leaves a partial result
and its log-sum-exp, and `combine_kernel` adds them up.  `triton/backend.py` lays the work out and
names the fields used here.  TRITON_INTERPRET=1, set before the first import of
triton, runs both on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

# int32 words per item: the tile, its first key, the key after its last, and where the partial
# result goes (-1: the item is the tile's only one and writes the output itself).
ITEM_WORDS = tl.constexpr(4)
# int32 words per tile: first batch row; rows; where its sequence's slots start; context length;
# where the visibility words of its first row start; such words per row; where the sequence's node
# positions start; its first partial result; how many there are.  A tile of no rows has no effect.
TILE_WORDS = tl.constexpr(9)
# int32 words per row of a split tile: the tile, and which of its rows.
SPLIT_WORDS = tl.constexpr(2)
# Partial results that are added up side by side; few tiles have more.
PARTIALS_AT_ONCE = tl.constexpr(16)


@triton.jit  # type: ignore[untyped-decorator]
def _bounded(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """softcap * tanh(scores / softcap), which saturates instead of overflowing."""
    return softcap - 2 * softcap / (tl.exp(2 * scores / softcap) + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _visible(
    key: tl.tensor,
    exists: tl.tensor,
    position: tl.tensor,
    row: tl.tensor,
    context_len: tl.tensor,
    bits: tl.tensor,
    words_per_row: tl.tensor,
    node_positions: tl.tensor,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """bool[rows, keys]: the context up to the row; for a node also itself and its ancestors."""
    node = key - context_len
    is_node = exists & (node >= 0)
    word = tl.load(
        bits + row[:, None] * words_per_row + (node // 32)[None, :],
        mask=(position >= context_len)[:, None] & is_node[None, :],
        other=0,
    )
    seen = ((word >> (node & 31)[None, :]) & 1) != 0
    visible = tl.where(is_node[None, :], seen, key[None, :] <= position[:, None])
    if WINDOW:
        known = tl.load(node_positions + node, mask=is_node, other=0)
        key_position = tl.where(is_node, known, key)
        visible = visible & (key_position[None, :] > position[:, None] - WINDOW)
    return visible & exists[None, :]


@triton.jit(  # type: ignore[untyped-decorator]
    # Offsets that change from step to step; specialised, they would compile anew.
    do_not_specialize=["tiles", "positions"]
)
def attend_kernel(
    query: tl.tensor,
    kv: tl.tensor,
    output: tl.tensor,
    partials: tl.tensor,
    partial_lse: tl.tensor,
    sinks: tl.tensor,
    layout: tl.tensor,
    tiles: tl.tensor,
    positions: tl.tensor,
    query_head_stride: tl.tensor,
    query_row_stride: tl.tensor,
    slot_stride: tl.tensor,
    value_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SHARING: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid (items, key heads).  Line m of a tile is query head m % SHARING of row m // SHARING.

    layout: the int32 words of a step; `tiles` and `positions` are where these sections start.
    partials: float32[partials, key heads, BLOCK_M, HEAD_DIM]; partial_lse: the same without the
    last dimension.  output: [rows, heads, HEAD_DIM].
    """
    item = layout + tl.program_id(0) * ITEM_WORDS
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    start, stop, partial = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    tile = layout + tiles + tl.load(item) * TILE_WORDS
    row_start, num_rows, context_len = tl.load(tile), tl.load(tile + 1), tl.load(tile + 3)
    slots_of = layout + tl.load(tile + 2)
    bits_of, words_per_row = layout + tl.load(tile + 4), tl.load(tile + 5)
    node_positions_of = layout + tl.load(tile + 6)

    line, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    row, head = line // SHARING, kv_head * SHARING + line % SHARING
    real, in_head = row < num_rows, dim < HEAD_DIM
    position = tl.load(layout + positions + row_start + row, mask=real, other=-1)
    query_of = query + head * query_head_stride + (row_start + row).to(tl.int64) * query_row_stride
    queries = tl.load(
        query_of[:, None] + dim[None, :], mask=real[:, None] & in_head[None, :], other=0.0
    )
    if WINDOW:
        first = tl.min(tl.where(real, position, 2147483647), axis=0) - WINDOW + 1
        start = tl.maximum(start, tl.minimum(first, context_len))

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Whole blocks of the context that every row sees need no mask.  Products of float32 leave no
    # registers for a second loop.
    unmasked = start
    if not WINDOW and PRECISION != "ieee":
        seen = tl.minimum(tl.min(tl.where(real, position, stop), axis=0) + 1, context_len)
        unmasked += tl.maximum(tl.minimum(seen, stop) - start, 0) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(2):
        for block in range(unmasked if masked else start, stop if masked else unmasked, BLOCK_N):
            key = block + tl.arange(0, BLOCK_N)
            exists = (key < stop) if masked else tl.full([BLOCK_N], True, tl.int1)
            slot = tl.load(slots_of + key, mask=exists, other=0).to(tl.int64)
            key_of = kv + slot * slot_stride + kv_head * kv_head_stride  # [BLOCK_N]
            there = exists[:, None] & in_head[None, :]
            keys = tl.load(key_of[:, None] + dim[None, :], mask=there, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scaling
            if CAPPED:
                scores = _bounded(scores, softcap)
            if masked:
                visible = _visible(
                    key,
                    exists,
                    position,
                    row,
                    context_len,
                    bits_of,
                    words_per_row,
                    node_positions_of,
                    WINDOW,
                )
                scores = tl.where(visible, scores, float("-inf"))
            highest = tl.maximum(maximum, tl.max(scores, axis=1))
            # A row that has seen nothing yet: -inf less -inf would be no number.
            shift = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp(scores - shift[:, None])
            fade = tl.exp(maximum - shift)
            values = tl.load(key_of[:, None] + value_stride + dim[None, :], mask=there, other=0.0)
            total = total * fade + tl.sum(weights, axis=1)
            weighted = weighted * fade[:, None]
            weighted += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
            maximum = highest

    if partial < 0:
        if SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            top = tl.maximum(maximum, sink)
            weighted = weighted * tl.exp(maximum - top)[:, None]
            total = total * tl.exp(maximum - top) + tl.exp(sink - top)
        total = tl.where(total > 0, total, 1.0)  # padding rows see nothing; their output is 0
        num_heads = num_kv_heads * SHARING
        output_of = output + ((row_start + row).to(tl.int64) * num_heads + head) * HEAD_DIM
        tl.store(
            output_of[:, None] + dim[None, :],
            (weighted / total[:, None]).to(output.dtype.element_ty),
            mask=real[:, None] & in_head[None, :],
        )
    else:
        lse = maximum + tl.log(tl.where(total > 0, total, 1.0))
        line_of = (partial.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + line
        tl.store(partial_lse + line_of, lse)
        weighted = weighted / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            partials + line_of[:, None] * HEAD_DIM + dim[None, :],
            weighted,
            mask=in_head[None, :],
        )


@triton.jit(do_not_specialize=["tiles", "split_rows"])  # type: ignore[untyped-decorator]
def combine_kernel(
    output: tl.tensor,
    partials: tl.tensor,
    partial_lse: tl.tensor,
    sinks: tl.tensor,
    layout: tl.tensor,
    tiles: tl.tensor,
    split_rows: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SHARING: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid (rows of tiles with several items, key heads, SHARING): one row and head each."""
    split = layout + split_rows + tl.program_id(0) * SPLIT_WORDS
    tile, row = layout + tiles + tl.load(split) * TILE_WORDS, tl.load(split + 1)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    head, line = kv_head * SHARING + tl.program_id(2), row * SHARING + tl.program_id(2)
    row_start, num_rows = tl.load(tile), tl.load(tile + 1)
    first, count = tl.load(tile + 7).to(tl.int64), tl.load(tile + 8)
    if row >= num_rows:
        return
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    # The sum so far and its scale; a sink is a first term that adds to the sum alone.
    maximum = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    if SINKS:
        maximum = tl.load(sinks + head).to(tl.float32)
        total += 1.0
    weighted = tl.zeros([BLOCK_D], tl.float32)
    part = tl.arange(0, PARTIALS_AT_ONCE)
    for start in range(0, count, PARTIALS_AT_ONCE):
        exists = start + part < count
        line_of = ((first + start + part) * num_kv_heads + kv_head) * BLOCK_M + line
        lse = tl.load(partial_lse + line_of, mask=exists, other=-float("inf"))
        highest = tl.maximum(maximum, tl.max(lse, axis=0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        fade, weights = tl.exp(maximum - shift), tl.exp(lse - shift)
        values = tl.load(
            partials + line_of[:, None] * HEAD_DIM + dim[None, :],
            mask=exists[:, None] & in_head[None, :],
            other=0.0,
        )
        # Sums of a block are trees of pairs.
        total = total * fade + tl.sum(weights, axis=0)
        weighted = weighted * fade + tl.sum(values * weights[:, None], axis=0)
        maximum = highest
    output_of = output + ((row_start + row).to(tl.int64) * num_kv_heads * SHARING + head) * HEAD_DIM
    total = tl.where(total > 0, total, 1.0)
    tl.store(output_of + dim, (weighted / total).to(output.dtype.element_ty), mask=in_head)
