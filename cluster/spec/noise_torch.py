"""The noise of `cluster.spec.noise` on torch devices, for rows over the whole vocabulary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from cluster.spec.noise import (
    KEY_STEP_0,
    KEY_STEP_1,
    MASK32,
    MULTIPLIER_0,
    MULTIPLIER_1,
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
    c1, c2 = column(positions), column(streams)
    c3 = torch.zeros_like(c1)
    for _ in range(NUM_ROUNDS):
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = ((p1 >> 32) & MASK32) ^ c1 ^ k0
        c2 = ((p0 >> 32) & MASK32) ^ c3 ^ k1
        c1, c3 = p1 & MASK32, p0 & MASK32
        k0, k1 = (k0 + KEY_STEP_0) & MASK32, (k1 + KEY_STEP_1) & MASK32
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


class NoiseRows:
    """Remembers noise rows, so that each (seed, position, stream) is computed once.

    The deeper rows of a step's tree have the same output positions as the first rows of the next
    step's tree.  The least recently used rows are dropped first.
    max_bytes: limit for the memory of the remembered rows.
    """

    def __init__(self, vocab_size: int, device: torch.device, max_bytes: int = 128 * 2**20) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._max_rows = max(max_bytes // (4 * vocab_size), 1)
        self._rows: OrderedDict[Triple, torch.Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, triples: Sequence[Triple]) -> torch.Tensor:
        """float32[len(triples), vocab_size]; missing rows are computed in one call."""
        missing = [triple for triple in dict.fromkeys(triples) if triple not in self._rows]
        computed: dict[Triple, torch.Tensor] = {}
        if missing:
            seeds, positions, streams = zip(*missing, strict=True)
            block = gumbel_rows(seeds, positions, streams, self.vocab_size, self.device)
            computed = dict(zip(missing, block.unbind(0), strict=True))
        known = [triple for triple in triples if triple not in computed]
        rows = torch.stack(
            [computed[t] if t in computed else self._rows[t] for t in triples]
        )  # [rows, vocab]
        for triple in known:
            self._rows.move_to_end(triple)
        if len(missing) <= self._max_rows:  # more of them would displace each other
            self._remember(computed)
        return rows

    def _remember(self, computed: dict[Triple, torch.Tensor]) -> None:
        while len(self._rows) + len(computed) > self._max_rows:
            self._rows.popitem(last=False)
        for triple, row in computed.items():
            # A copy: a view would keep the whole block for as long as any of its rows.
            self._rows[triple] = row.clone()
