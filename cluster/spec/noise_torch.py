"""The noise of `cluster.spec.noise` on torch devices, for rows over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.spec.noise import (
    KEY_STEPS,
    MASK32,
    MULTIPLIERS,
    NUM_ROUNDS,
)
from cluster.spec.noise import gumbel_rows as gumbel_rows_numpy

Triple = tuple[int, int, int]  # seed, output position, stream

# Rows computed at once: the int64 and float64 temporaries of a row are many times its own size.
_ROWS_AT_ONCE = 32


def philox_words(
    seeds: Sequence[int],
    positions: Sequence[int],
    streams: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> torch.Tensor:
    """First output words of Philox4x32-10: int64[rows, vocab_size], values below 2^32.

    Words live in int64: a product of two of them wraps into the sign, but its bits are right, and
    the mask after the arithmetic shift drops the copies of the sign.
    """

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([value & MASK32 for value in values], device=device).unsqueeze(1)

    k0, k1 = column(seeds), column([seed >> 32 for seed in seeds])  # [rows, 1]
    c0 = torch.arange(vocab_size, device=device).expand(len(seeds), -1)  # [rows, vocab]
    return philox((c0, column(positions), column(streams)), (k0, k1))


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """`philox_words` of any token ids, positions and streams, which are broadcast against each
    other and the low and high words of the seeds; int64 each."""
    (c0, c1, c2), (k0, k1) = counter, key
    c3 = torch.zeros_like(c1)
    for _ in range(NUM_ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((p1 >> 32) & MASK32) ^ c1 ^ k0
        c2 = ((p0 >> 32) & MASK32) ^ c3 ^ k1
        c1, c3 = p1 & MASK32, p0 & MASK32
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return c0


def gumbel_rows(
    seeds: Sequence[int],
    positions: Sequence[int],
    streams: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Noise over the whole vocabulary: float32[rows, vocab_size] on `device`."""
    if device.type == "cpu":
        # NumPy's in-place passes are several times faster than eager torch here.
        return torch.from_numpy(gumbel_rows_numpy(seeds, positions, streams, vocab_size))
    return gumbel_rows_eager(seeds, positions, streams, vocab_size, device)


def gumbel_rows_eager(
    seeds: Sequence[int],
    positions: Sequence[int],
    streams: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> torch.Tensor:
    """`gumbel_rows` in torch operations on any device; the memory it needs besides is bounded."""
    rows = torch.empty((len(seeds), vocab_size), dtype=torch.float32, device=device)
    for start in range(0, len(seeds), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        words = philox_words(seeds[part], positions[part], streams[part], vocab_size, device)
        rows[part] = gumbel_of_words(words)
    return rows


def gumbel_of_words(words: torch.Tensor) -> torch.Tensor:
    """Philox words as Gumbel noise: float64 until the last step, then float32."""
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform)).to(torch.float32)
