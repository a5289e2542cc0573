"""What stands between the matrix products of a decoder layer, in three Triton kernels.

Each reads its rows once and writes them once.  Numbers are rounded to the model's format where
transformers rounds them, and computed with in float32 in between.  TRITON_INTERPRET=1, set before
the first import of triton, runs them on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements of a row that one program of `silu_kernel` computes: 8 for each of its threads, which of
# 16 bits are loads of 128 bits.
_SILU_BLOCK = 1024
# A thread keeps up to 16 elements of its row; of a row of 8,192 by 16 warps.
_ELEMENTS_PER_WARP, _MOST_WARPS = 512, 16


@triton.jit(  # type: ignore[untyped-decorator]
    # A graph's rows begin at any word.
    do_not_specialize_on_alignment=["wanted"]
)
def add_norm_kernel(
    hidden: tl.tensor,
    change: tl.tensor,
    wanted: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    ADDS: tl.constexpr,
    CHOOSES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows of the output).  output = weight * RMSNorm(hidden + change), where ADDS; the sum
    replaces hidden unless CHOOSES, by which row i is row wanted[i] (int64) of both.  output may be
    change's memory where it does not choose."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(wanted + place) if CHOOSES else place
    column = tl.arange(0, BLOCK)
    exists = column < SIZE
    own = row * SIZE + column
    values = tl.load(hidden + own, mask=exists, other=0.0)
    if ADDS:
        added = tl.load(change + own, mask=exists, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + added).to(hidden.dtype.element_ty)
        if not CHOOSES:
            tl.store(hidden + own, values, mask=exists)
    scaled = _normed(values.to(tl.float32), SIZE, epsilon).to(hidden.dtype.element_ty)
    weights = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    result = scaled.to(tl.float32) * weights
    tl.store(output + place * SIZE + column, result.to(output.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(values: tl.tensor, size: tl.constexpr, epsilon: tl.tensor) -> tl.tensor:
    """float32[BLOCK], zeros behind the first `size`."""
    return values * tl.rsqrt(tl.sum(values * values, axis=0) / size + epsilon)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize_on_alignment=["positions", "slots"]
)
def rotate_kernel(
    qkv: tl.tensor,
    kv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    rotations: tl.tensor,
    norms: tl.tensor,
    num_positions: tl.tensor,
    slot_stride: tl.tensor,
    value_stride: tl.tensor,
    head_stride: tl.tensor,
    epsilon: tl.tensor,
    SHARING: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid (rows, key heads).  qkv: [rows, heads, HEAD_DIM], the heads of queries, of keys, of
    values; a program has those of a key head, which SHARING queries share.

    Queries are normed, where NORMS, and rotated in place; keys too, and go to the cache, and so do
    values.  rotations: [2, positions, HEAD_DIM / 2], cosines first.  norms: [2, HEAD_DIM], weights
    of queries and keys.  positions, slots: int64[rows]."""
    row, kv_head, num_kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    half: tl.constexpr = HEAD_DIM // 2
    line, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_head = dim < half
    num_queries = num_kv_heads * SHARING
    row_of = qkv + row * (num_queries + 2 * num_kv_heads) * HEAD_DIM
    key_of = kv + tl.load(slots + row) * slot_stride + kv_head * head_stride + dim
    value_of = row_of + (num_queries + num_kv_heads + kv_head) * HEAD_DIM + dim
    for start in tl.static_range(0, HEAD_DIM, half):
        value = tl.load(value_of + start, mask=in_head, other=0.0)
        tl.store(key_of + value_stride + start, value.to(kv.dtype.element_ty), mask=in_head)

    # The last line is the key's.
    is_key = line == SHARING
    head = tl.where(is_key, num_queries + kv_head, kv_head * SHARING + line)
    own = row_of + head[:, None] * HEAD_DIM + dim[None, :]
    exists = (line <= SHARING)[:, None] & in_head[None, :]
    first = tl.load(own, mask=exists, other=0.0)
    second = tl.load(own + half, mask=exists, other=0.0)
    if NORMS:
        one, other = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt(tl.sum(one * one + other * other, axis=1) / HEAD_DIM + epsilon)[:, None]
        weight = norms + is_key[:, None].to(tl.int32) * HEAD_DIM + dim[None, :]
        weights = tl.load(weight, mask=exists, other=0.0)
        first = _times((one * scale).to(first.dtype), weights)
        weights = tl.load(weight + half, mask=exists, other=0.0)
        second = _times((other * scale).to(second.dtype), weights)
    angle = rotations + tl.load(positions + row) * half + dim
    cosine = tl.load(angle, mask=in_head, other=0.0)[None, :]
    sine = tl.load(angle + num_positions * half, mask=in_head, other=0.0)[None, :]
    left = _times(first, cosine).to(tl.float32) - _times(second, sine).to(tl.float32)
    right = _times(second, cosine).to(tl.float32) + _times(first, sine).to(tl.float32)
    # Keys too by way of the model's format: the cache's may be finer.
    left, right = left.to(first.dtype), right.to(first.dtype)
    is_query = exists & ~is_key[:, None]
    tl.store(own, left, mask=is_query)
    tl.store(own + half, right, mask=is_query)
    written, is_own = tl.broadcast_to(key_of[None, :], [BLOCK_M, BLOCK_D]), exists & is_key[:, None]
    tl.store(written, left.to(kv.dtype.element_ty), mask=is_own)
    tl.store(written + half, right.to(kv.dtype.element_ty), mask=is_own)


@triton.jit  # type: ignore[untyped-decorator]
def _times(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """The product, rounded to the format of both."""
    return (one.to(tl.float32) * other.to(tl.float32)).to(one.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def silu_kernel(
    gate_up: tl.tensor, output: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Grid (rows, blocks of SIZE).  output [rows, SIZE] = silu(gate) * up of [gate, up]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    own = gate_up + row * 2 * SIZE + column
    gate = tl.load(own, mask=exists, other=0.0)
    up = tl.load(own + SIZE, mask=exists, other=0.0)
    wide = gate.to(tl.float32)
    product = _times((wide / (1.0 + tl.exp(-wide))).to(gate.dtype), up)
    tl.store(output + row * SIZE + column, product, mask=exists)


def add_norm(
    hidden: torch.Tensor,
    change: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    wanted: torch.Tensor | None = None,
) -> torch.Tensor:
    """The RMS norm of hidden + change, [rows, size]; without `wanted` the sum replaces hidden, and
    the norm what is added.

    change: None = nothing.  wanted: int64[n], the rows that are asked for; None = all."""
    num_rows, size = (len(hidden) if wanted is None else len(wanted)), hidden.shape[1]
    # Each program has read its row before it writes it.
    output = hidden.new_empty(num_rows, size) if change is None or wanted is not None else change
    block = triton.next_power_of_2(size)
    add_norm_kernel[(num_rows,)](
        hidden,
        hidden if change is None else change,
        hidden if wanted is None else wanted,
        weight,
        output,
        epsilon,
        SIZE=size,
        ADDS=change is not None,
        CHOOSES=wanted is not None,
        BLOCK=block,
        num_warps=min(max(block // _ELEMENTS_PER_WARP, 4), _MOST_WARPS),
    )
    return output


def rotate(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotations: torch.Tensor,
    norms: torch.Tensor | None,
    epsilon: float,
) -> torch.Tensor:
    """Bring the rows' keys and values into the cache; returns the queries, [heads, rows, head_dim],
    in the memory of qkv [rows, heads and twice key heads, head_dim].

    kv: a layer of the cache.  For the others see `rotate_kernel`."""
    num_rows, num_heads, head_dim = qkv.shape
    kv_heads = kv.shape[2]
    sharing = num_heads // kv_heads - 2
    rotate_kernel[(num_rows, kv_heads)](
        qkv,
        kv,
        positions,
        slots,
        rotations,
        rotations if norms is None else norms,
        rotations.shape[1],
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        epsilon,
        SHARING=sharing,
        HEAD_DIM=head_dim,
        NORMS=norms is not None,
        BLOCK_M=triton.next_power_of_2(sharing + 1),
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
    )
    return qkv[:, : sharing * kv_heads].transpose(0, 1)


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [rows, 2 * size] -> [rows, size]."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, size)
    silu_kernel[(num_rows, triton.cdiv(size, _SILU_BLOCK))](
        gate_up, output, SIZE=size, BLOCK=_SILU_BLOCK
    )
    return output
