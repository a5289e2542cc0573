"""The target's draw at every row: argmax of scaled logits plus shared noise (Gumbel-max)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from cluster.core import FloatArray, SamplingParams, TokenArray
from cluster.records import record
from cluster.spec.noise import MASK32, gumbel, gumbel_row, philox
from cluster.spec.sampling import (
    WORKSPACE_BYTES,
    RowLaws,
    Survivors,
    among_greatest,
    pack,
    scale,
    single_precision,
    survivors,
)
from cluster.spec.transfer import Transfer, received, sent
from cluster.spec.tree import Floats, Indices

# The noise of `cluster.spec.noise` on torch devices, for rows over the whole vocabulary.

Triple = tuple[int, int, int]  # seed, output position, stream

# Rows computed at once: the int64 and float64 temporaries of a row are many times its own size.
_NOISE_ROWS_AT_ONCE = 32


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
    for start in range(0, len(rows), _NOISE_ROWS_AT_ONCE):
        part = slice(start, start + _NOISE_ROWS_AT_ONCE)
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


# In place of a token, of a row whose draw has to wait until its logits are sorted.
_UNSETTLED = -2
# Rows that are drawn from at once; more take turns, so that their copies take no more memory.
ROWS_AT_ONCE = 256
# The most tensors of their logits' size, beside the forward's: while penalties are applied the
# joined logits, counts, old and new logits and what those are made of; and behind them the joined
# logits, those of the sampled rows, and the scaled ones.
_NUM_PENALISED, _NUM_TRUNCATED = 7, 3


@record
class DrawRows:
    """The inputs of each row's draw besides its logits.

    packed: float64[rows, 4] of `sampling.pack`.  keys: int64[3, rows], of the noise: the bits of
    the seeds, output positions and streams.  is_truncated: the law of some row is.
    """

    packed: Floats
    keys: Indices
    is_truncated: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], positions: Sequence[Indices]) -> DrawRows:
        """The rows of texts with these parameters; positions: of each text's rows."""
        owners = np.repeat(np.arange(len(params)), [len(each) for each in positions])
        seeds = np.array([each.noise_key for each in params], dtype=np.uint64).view(np.int64)
        streams = np.array([each.stream for each in params])[owners] & MASK32
        return cls(
            np.array([pack(each) for each in params])[owners],
            np.stack((seeds[owners], np.concatenate(positions) & MASK32, streams)),
            any(each.is_truncated for each in params),
        )

    def take(self, rows: Indices) -> DrawRows:
        """The rows with these indices."""
        return DrawRows(self.packed[rows], self.keys[:, rows], self.is_truncated)


# Adds the noise and takes the maximum in one pass, without rows of noise in memory; of rows of
# positive temperature: (logits, maxima, temperatures, cutoffs, keys) -> int64[rows].  Equal scores
# go to the lowest id.
#
# logits: float32[rows, vocab] on the device it is made for.  maxima, temperatures, cutoffs:
# float32[rows]; cutoffs bound the scaled logits from below, None = nothing is truncated.  keys:
# `DrawRows.keys`.
FusedDraw = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor
]


def _as_they_are(drawn: TokenArray) -> TokenArray:
    return drawn


class Draws:
    """One token per row, int32[rows], that a GPU may still be drawing.

    token_ids: on the logits' device; below 0 where `taken` may give another one.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        settle: Callable[[TokenArray], TokenArray] = _as_they_are,
    ) -> None:
        """settle: draws on the host what the device has left open."""
        self.token_ids = token_ids
        self._transfer, self._settle = Transfer(token_ids), settle

    @property
    def on_device(self) -> TokenArray:
        """`token_ids` on the host, once the device has drawn them."""
        return self._transfer.received()

    def taken(self) -> TokenArray:
        """The tokens, once they are drawn."""
        drawn, self._settle = self._settle(self.on_device.copy()), _as_they_are
        return drawn  # and what settled them lets go of its logits


def begin_draw(
    logits: torch.Tensor, rows: DrawRows | None, fused: FusedDraw | None = None
) -> Draws:
    """Draw one token per row; equal scores go to the lowest token id.

    -1: the row's logits have no finite maximum (NaN, infinite, or everything banned), so there is
    no law to draw from.

    logits: float32[rows, vocab] after penalties, bias and bans; not changed.  rows: None when
    every row is greedy, which then costs one pass and one transfer.  fused: a faster equivalent.
    """
    # torch.max documents that the first of several maxima is returned, and NaN counts as largest.
    maxima, token_ids = logits.max(dim=1)
    if rows is not None:
        sampled = np.flatnonzero(rows.packed[:, 0] > 0.0)
        if len(sampled) == len(token_ids):
            token_ids = _draw_sampled(logits, maxima, rows, fused)
        elif len(sampled):
            index = sent(sampled, logits.device)
            token_ids[index] = _draw_sampled(
                logits[index], maxima[index], rows.take(sampled), fused
            )

    def settle(drawn: TokenArray) -> TokenArray:
        unsettled = np.flatnonzero(drawn == _UNSETTLED)
        if rows is not None and len(unsettled):
            index = sent(unsettled, logits.device)
            late = rows.take(unsettled)
            drawn[unsettled] = received(
                _draw_sampled(logits[index], maxima[index], late, fused, sorts=True)
            )
        return drawn

    return Draws(torch.where(maxima.abs() < torch.inf, token_ids, -1).int(), settle)


def _draw_sampled(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    rows: DrawRows,
    fused: FusedDraw | None,
    *,
    sorts: bool = False,
) -> torch.Tensor:
    """Draw at rows of positive temperature: int64[rows].

    sorts: whether the host waits for the device where it has to; else rows that must be sorted may
    be _UNSETTLED."""
    laws, keys = RowLaws.sent(rows.packed, rows.keys, logits.device)

    def drawn(cutoffs: torch.Tensor | None) -> torch.Tensor:
        if fused is None:
            return _draw_full(scaled, cutoffs, keys)
        return fused(logits, maxima, laws.temperature, cutoffs, keys)

    if fused is not None and not rows.is_truncated:
        return drawn(None)
    scaled = scale(logits, maxima, laws.temperature)  # [rows, vocab]
    if not rows.is_truncated:
        return drawn(None)
    if fused is None and logits.device.type == "cpu":
        return _draw_on_cpu(scaled, survivors(scaled, laws), keys)
    if sorts:
        return drawn(survivors(scaled, laws).cutoffs)
    found, settled = among_greatest(scaled, laws)
    return torch.where(settled, drawn(found.cutoffs), _UNSETTLED)


def _draw_on_cpu(scaled: torch.Tensor, found: Survivors, keys: torch.Tensor) -> torch.Tensor:
    """Draw at rows that are truncated, with noise for no more tokens than may be drawn."""
    token_ids = torch.from_numpy(_draw_among(found, keys.numpy()))
    others = torch.nonzero(~found.complete).squeeze(1)
    if len(others):
        token_ids[others] = _draw_full(scaled[others], found.cutoffs[others], keys[:, others])
    return token_ids


def drawing_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the most memory that drawing at num_rows rows takes on a GPU, with their logits."""
    row = vocab_size * torch.float32.itemsize
    at_once = min(num_rows, ROWS_AT_ONCE) * row
    copies = max(_NUM_PENALISED * at_once, _NUM_TRUNCATED * at_once + WORKSPACE_BYTES)
    return num_rows * row + copies


def winner_among(
    logits: torch.Tensor, token_ids: Indices, temperature: float, triple: Triple
) -> int:
    """Return the draw at one row if only the tokens of token_ids can win.

    logits: float32[vocab] after penalties, bias and bans.  token_ids: int64, ascending.
    temperature: positive; nothing is truncated.
    """
    laws = single_precision(torch.tensor([temperature], dtype=torch.float64))
    values = logits[torch.from_numpy(token_ids)].unsqueeze(0)
    scores = scale(values, logits.amax().unsqueeze(0), laws).numpy()[0]
    seed, position, stream = triple
    # The first of several maxima is the lowest id.
    return int(token_ids[(scores + gumbel(seed, position, token_ids, stream)).argmax()])


def _draw_full(
    scaled: torch.Tensor, cutoffs: torch.Tensor | None, keys: torch.Tensor
) -> torch.Tensor:
    scores = gumbel_rows(keys, scaled.shape[1]).add_(scaled)
    if cutoffs is not None:
        scores.masked_fill_(scaled < cutoffs.unsqueeze(1), -torch.inf)
    return scores.max(dim=1).indices


def _draw_among(found: Survivors, keys: Indices) -> Indices:
    """Draw at rows whose survivors are all known: only these need noise.  Others get any token."""
    values, token_ids = found.values.numpy(), found.token_ids.numpy()
    alive = values >= found.cutoffs.numpy()[:, None]
    row, column = np.nonzero(alive)
    seeds, positions, streams = keys[:, row].view(np.uint64)
    noise = gumbel(seeds, positions, token_ids[row, column], streams)
    scores: FloatArray = np.full(values.shape, -np.inf, dtype=np.float32)
    scores[row, column] = values[row, column] + noise
    tied = alive & (scores == scores.max(axis=1, keepdims=True))
    # A row of NaN has no survivors; its draw is invalid in any case.
    return np.where(tied, token_ids, np.iinfo(np.int64).max).min(axis=1)


# How far a token is from being drawn: what tells rounding from a fault.


def gap_of(
    logits: torch.Tensor, drawn: int, given: int, params: SamplingParams, triple: Triple
) -> float:
    """Return the least change of logits by which `given` would have been drawn in place of `drawn`.

    logits: float32[vocab] after penalties, bias and bans.  triple: of the noise.  Where the law
    truncates, a change that moves one of the two over the border counts too.  inf: `given` is
    banned, or a logit is no number.
    """
    row = logits.unsqueeze(0)
    if params.temperature == 0.0:
        return _finite(float(row[0, drawn] - row[0, given]))
    laws = RowLaws.of([params], logits.device)
    scaled = scale(row, row.amax(dim=1), laws.temperature)
    cutoff = float(survivors(scaled, laws).cutoffs[0])
    values = scaled[0].cpu().numpy()
    kept = np.flatnonzero(values >= cutoff)
    seed, position, stream = triple

    def best(token_ids: Indices) -> float:
        noise = gumbel(seed, position, token_ids, stream)
        return float((values[token_ids] + noise).max(initial=-np.inf))

    own = best(np.array([given]))
    outside = max(cutoff - float(values[given]), 0.0)
    # `given` must overtake all, or `drawn` fall behind the border and `given` overtake the others.
    overtakes = max(best(kept) - own, outside)
    others = kept[(kept != drawn) & (kept != given)]
    follows = max(float(values[drawn]) - cutoff, best(others) - own, outside)
    return _finite(min(overtakes, follows) * float(laws.temperature[0]))


def _finite(gap: float) -> float:
    return max(gap, 0.0) if math.isfinite(gap) else math.inf
