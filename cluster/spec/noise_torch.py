"""The noise of `cluster.spec.noise` on torch devices, for rows over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from cluster.spec.noise import MASK32, gumbel_row, philox

Triple = tuple[int, int, int]  # seed, output position, stream

# Rows computed at once: the int64 and float64 temporaries of a row are many times its own size.
_ROWS_AT_ONCE = 32


def gumbel_rows(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise over the whole vocabulary: float32[rows, vocab_size] on the device of `keys`.

    keys: int64[3, rows], seeds (their bits), output positions and streams.
    """
    if keys.device.type == "cpu":
        # NumPy is several times faster than eager torch here, and keeps rows.
        seeds, positions, streams = keys.numpy()
        triples = zip(
            seeds.view(np.uint64).tolist(), positions.tolist(), streams.tolist(), strict=True
        )
        return torch.from_numpy(np.stack([gumbel_row(*triple, vocab_size) for triple in triples]))
    return gumbel_rows_eager(keys, vocab_size)


def gumbel_rows_eager(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`gumbel_rows` in torch operations on any device; the memory it needs besides is bounded."""
    rows = torch.empty((keys.shape[1], vocab_size), dtype=torch.float32, device=keys.device)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        rows[part] = gumbel_of_words(philox_words(keys[:, part], vocab_size))
    return rows


def philox_words(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """First output words of Philox4x32-10: int64[rows, vocab_size], values below 2^32."""
    seeds, positions, streams = keys.unsqueeze(2).unbind()  # each [rows, 1]
    token_ids = torch.arange(vocab_size, device=keys.device)
    halves = seeds & MASK32, (seeds >> 32) & MASK32
    return philox((token_ids, positions, streams, 0), halves)[0]


def gumbel_of_words(words: torch.Tensor) -> torch.Tensor:
    """Philox words as Gumbel noise: float64 until the last step, then float32."""
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform)).to(torch.float32)
