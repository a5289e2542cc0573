"""The target's draw on NVIDIA GPUs, noise and argmax in one Triton kernel.

    token = argmax over the vocabulary of (logits - maximum) / temperature + G

G is the noise of `cluster.spec.noise`: Philox4x32-10 (Salmon et al. 2011) of seed, output position,
token and stream, made where it is added, so no row of noise is ever written or read.  Each program
settles one block of one row; the winners of a row's blocks are compared by torch.
TRITON_INTERPRET=1, set before the first import of triton, runs it on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cluster.engine.launch import LAUNCH_ERRORS, KernelHealth, on_device
from cluster.spec.draw import FusedDraw

_BLOCK = 1024


@triton.jit(  # type: ignore[untyped-decorator]
    # Rows and keys begin at any address: specialised, the kernel would compile anew for numbers of
    # rows that nobody has met before.
    do_not_specialize=["row_stride", "num_blocks"],
    do_not_specialize_on_alignment=["logits", "seeds", "positions", "streams"],
)
def draw_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    maxima: tl.tensor,
    temperatures: tl.tensor,
    cutoffs: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    streams: tl.tensor,
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The greatest score of each block of each row, and the lowest token that has it.

    logits: float32[rows, vocab].  maxima, temperatures, cutoffs: float32[rows]; cutoffs are bounds
    on the scaled logits, read where TRUNCATED.  seeds, positions, streams: int64[rows], the last
    two below 2^32.  best_scores, best_tokens: float32 and int64 [rows, blocks].
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab_size
    logit = tl.load(logits + row * row_stride + token, mask=exists, other=-float("inf"))
    scaled = tl.div_rn(logit - tl.load(maxima + row), tl.load(temperatures + row))
    zero = tl.zeros([BLOCK], dtype=tl.uint32)
    position = tl.load(positions + row).to(tl.uint32) + zero
    stream = tl.load(streams + row).to(tl.uint32) + zero
    word, _, _, _ = tl.philox(tl.load(seeds + row), token.to(tl.uint32), position, stream, zero)
    # In float64 all of 1 - U is kept, so the plain logarithm has what log1p has.
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    noise = (-tl.log(-tl.log(1.0 - uniform))).to(tl.float32)
    score = scaled + noise
    if TRUNCATED:
        score = tl.where(scaled < tl.load(cutoffs + row), -float("inf"), score)
    score = tl.where(exists, score, -float("inf"))
    place = row * num_blocks + block
    tl.store(best_scores + place, tl.max(score, axis=0))
    tl.store(best_tokens + place, (block * BLOCK + tl.argmax(score, axis=0)).to(tl.int64))


def create_draw(device: torch.device, vocab_size: int) -> FusedDraw | None:
    """`draw_tokens`, compiled and loaded; None, after a warning, where it cannot run."""
    health = KernelHealth("draws")
    one = torch.ones(1, device=device)
    keys = torch.zeros((3, 1), dtype=torch.int64, device=device)
    for cutoffs in (None, one):
        try:
            draw_tokens(torch.zeros((1, vocab_size), device=device), one, one, cutoffs, keys)
        except LAUNCH_ERRORS as error:
            health.fail(error)
            return None
    return draw_tokens


def draw_tokens(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    temperatures: torch.Tensor,
    cutoffs: torch.Tensor | None,
    keys: torch.Tensor,
) -> torch.Tensor:
    """int64[rows]; see `cluster.spec.draw.FusedDraw`.  Rows without a law get any token."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    seeds, positions, streams = keys
    scores = logits.new_empty((num_rows, num_blocks), dtype=torch.float32)
    tokens = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    rows_first = logits if logits.stride(1) == 1 else logits.contiguous()
    with on_device(logits.device):
        draw_kernel[(num_rows, num_blocks)](
            rows_first,
            rows_first.stride(0),
            maxima,
            temperatures,
            maxima if cutoffs is None else cutoffs,
            seeds,
            positions,
            streams,
            scores,
            tokens,
            vocab_size,
            num_blocks,
            TRUNCATED=cutoffs is not None,
            BLOCK=_BLOCK,
        )
    # torch.max returns the first of several maxima, which is the lowest token.
    return tokens.gather(1, scores.max(dim=1).indices.unsqueeze(1)).squeeze(1)
