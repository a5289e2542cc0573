"""From the target's logits to its law at every row: temperature and truncation.

The whole order, vLLM's (V1 sampler), over float32 logits:

    1. logit_bias                     (`penalties.py`)
    2. repetition, then frequency and presence penalties, over the row's own path
    3. stop ids are banned while fewer than min_tokens are out; then the sequence's hook, where it
       has one, e.g. a grammar's mask (`penalties.py`)
    4. temperature 0: argmax of what stands here; else division by the temperature
    5. min_p, then top_k, then top_p (top_p counts mass among the survivors of the two before it)

Candidates with equal logits stand or fall together at the borders of top_k and top_p, so the set
of survivors does not depend on how a sort breaks ties, nor on the batch around a row.  Each of
the three filters keeps exactly the candidates from some logit upwards, so a row's survivors are
described by one number, its cutoff.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cluster.core import SamplingParams
from cluster.records import record
from cluster.spec.transfer import sent
from cluster.spec.tree import Floats, Indices

# Most laws keep fewer candidates than this; finding so few is much cheaper than a whole sort.
NUM_CANDIDATES = 64
# On a GPU more of them cost little, and a row that they do not settle costs many passes.
_NUM_CANDIDATES_ON_GPU = 512
# The number of logits that are sorted, or whose masses are computed, at once: this bounds the extra
# memory.
_ENTRIES_AT_ONCE = 2**21
# 64 for each of them: a sort with its indices, or masses and their sums in 64 bits.
WORKSPACE_BYTES = 64 * _ENTRIES_AT_ONCE
# A power of two, so that float32 numbers are multiplied exactly.  The sum over a vocabulary of at
# most 2^20 tokens is below 2^63, and its total rounding error is below 2^-23 of the greatest mass.
_MASS_UNITS = float(2**43)


@record
class RowLaws:
    """Temperature and truncation per row, every tensor of shape [rows].

    temperature: float32, positive.  top_k: int64, 0 = off.  top_p: float64, 1 = off.
    min_cutoff: float32, min_p as a bound on the scaled logits, -inf = off.
    any_top_p, any_min_p: False where no row has the one; known without asking the device.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_cutoff: torch.Tensor
    any_top_p: bool
    any_min_p: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowLaws:
        """The laws of one row per entry of `params`."""
        packed = np.array([pack(each) for each in params])
        return cls.sent(packed, np.zeros((0, len(packed)), np.int64), device)[0]

    @classmethod
    def sent(
        cls, packed: Floats, keys: Indices, device: torch.device
    ) -> tuple[RowLaws, torch.Tensor]:
        """The laws and `keys` on `device`, brought there in one copy.

        packed: [rows, 4], each row made by `pack`.  keys: int64[any, rows]."""
        _, top_k, top_p, min_p = packed.T
        temperatures, _, _, min_ps = torch.from_numpy(packed).unbind(1)
        singles = torch.cat((single_precision(temperatures), min_ps.log().float()))
        laws = np.stack((top_k.astype(np.int64), top_p.view(np.int64), singles.view(torch.int64)))
        words = sent(np.concatenate((laws, keys)), device)
        temperature, min_cutoff = words[2].view(torch.float32).view(2, -1)
        any_top_p, any_min_p = bool((top_p < 1.0).any()), bool((min_p > 0.0).any())
        top_ps = words[1].view(torch.float64)
        return cls(temperature, words[0], top_ps, min_cutoff, any_top_p, any_min_p), words[3:]

    def take(self, rows: torch.Tensor) -> RowLaws:
        """The laws of the rows with these indices."""
        return RowLaws(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_cutoff[rows],
            self.any_top_p,
            self.any_min_p,
        )


def pack(params: SamplingParams) -> tuple[float, float, float, float]:
    """Return the parameters of a row's law after penalties and bias, as plain numbers."""
    return (params.temperature, float(params.top_k), params.top_p, params.min_p)


def single_precision(temperatures: torch.Tensor) -> torch.Tensor:
    """Convert positive temperatures from float64 to the float32 by which logits are divided.

    The result is neither zero nor infinite: a zero would turn the greatest logit into 0 / 0 = NaN.
    """
    limits = torch.finfo(torch.float32)
    return temperatures.clamp(limits.tiny, limits.max).float()


def scale(logits: torch.Tensor, maxima: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - row maximum) / temperature: float32[rows, vocab], at most 0.

    Shifting first keeps tiny temperatures from overflowing to anything but -inf.
    """
    return (logits - maxima.unsqueeze(1)).div_(temperature.unsqueeze(1))


@record
class Survivors:
    """The candidates that may be drawn at each row: scaled logits that are at least the cutoff.

    cutoffs: float32[rows].  values, token_ids: [rows, width], each row's greatest scaled logits,
    descending.  complete: bool[rows], True where they include all of the row's survivors.
    """

    cutoffs: torch.Tensor
    values: torch.Tensor
    token_ids: torch.Tensor
    complete: torch.Tensor


def survivors(scaled: torch.Tensor, laws: RowLaws, num_candidates: int | None = None) -> Survivors:
    """Truncate every row of `scaled` (float32[rows, vocab], maximum 0) by its own law.

    The greatest logits settle most rows; the others are sorted.  num_candidates: so many of the
    greatest, None = as suits the device; the result is the same for every number.
    """
    found, settled = among_greatest(scaled, laws, num_candidates)
    rest = torch.nonzero(~settled).squeeze(1)
    rows_at_once = max(_ENTRIES_AT_ONCE // scaled.shape[1], 1)
    for rows in torch.split(rest, rows_at_once) if len(rest) else ():
        found.cutoffs[rows] = sorted_cutoffs(scaled[rows], laws.take(rows))
    return found


def among_greatest(
    scaled: torch.Tensor, laws: RowLaws, num_candidates: int | None = None
) -> tuple[Survivors, torch.Tensor]:
    """What `survivors` finds without asking the device for anything, and bool[rows]: False where a
    row has to be sorted, and its cutoff is not the law's."""
    if num_candidates is None:
        num_candidates = NUM_CANDIDATES if scaled.device.type == "cpu" else _NUM_CANDIDATES_ON_GPU
    values, token_ids = scaled.topk(min(num_candidates, scaled.shape[1]), dim=1)
    cutoffs = _cutoffs(values, scaled, laws)
    has_all = values.shape[1] == scaled.shape[1]
    # A kept last value means that more may follow: a longer nucleus, or ties with it.
    complete = torch.ones_like(cutoffs).bool() if has_all else values[:, -1] < cutoffs
    # Without top-k and top-p the greatest logit alone determines a cutoff.
    is_open = (laws.top_p < 1.0) | ((laws.top_k > 0) & (laws.top_k < scaled.shape[1]))
    return Survivors(cutoffs, values, token_ids, complete), complete | ~is_open


def sorted_cutoffs(scaled: torch.Tensor, laws: RowLaws) -> torch.Tensor:
    """Find the cutoffs of rows by sorting each row: float32[rows]."""
    if scaled.device.type == "cpu":  # NumPy's vectorised sort is several times faster than torch's
        ascending = np.sort(scaled.numpy(), axis=1)
        return _cutoffs(torch.from_numpy(ascending[:, ::-1].copy()), scaled, laws)
    return _cutoffs(scaled.sort(dim=1, descending=True).values, scaled, laws)


def _cutoffs(values: torch.Tensor, scaled: torch.Tensor, laws: RowLaws) -> torch.Tensor:
    """Return the cutoffs, float32[rows]; where `values` does not determine the cutoff, a number
    that is not above any of the values.

    values: [rows, width], the greatest of `scaled`, descending.
    """
    width, vocab_size = values.shape[1], scaled.shape[1]
    last = (laws.top_k.clamp(1, width) - 1).unsqueeze(1)
    counted = (laws.top_k > 0) & (laws.top_k <= width)
    kth = values.gather(1, last).squeeze(1)
    cutoffs = torch.where(counted, torch.maximum(kth, laws.min_cutoff), laws.min_cutoff)
    unknown = torch.zeros_like(counted)
    if width < vocab_size:
        # The k-th value may stand further down, or have ties there.
        unknown = (laws.top_k > width) & (laws.top_k < vocab_size)
        unknown |= counted & (values[:, -1] >= cutoffs)
    nucleus = laws.top_p < 1.0
    if laws.any_top_p:
        masses = _masses(values).masked_fill_(values < cutoffs.unsqueeze(1), 0)
        cumulated = masses.cumsum(dim=1)
        # With top_k these values hold all the mass; without, the whole row does.
        total = torch.where(counted, cumulated[:, -1], _mass(scaled, laws))
        kept = (cumulated - masses).double() < (laws.top_p * total.double()).unsqueeze(1)
        num_kept = kept.sum(dim=1, keepdim=True).clamp_(min=1)
        smallest = values.gather(1, num_kept - 1).squeeze(1)
        cutoffs = torch.where(nucleus, torch.maximum(cutoffs, smallest), cutoffs)
    return cutoffs.masked_fill_(unknown, -torch.inf)


def _mass(scaled: torch.Tensor, laws: RowLaws) -> torch.Tensor:
    """The mass of the candidates that min_p keeps: int64[rows]."""
    rows_at_once = max(_ENTRIES_AT_ONCE // scaled.shape[1], 1)
    totals = []
    for rows, cutoffs in zip(
        torch.split(scaled, rows_at_once), torch.split(laws.min_cutoff, rows_at_once), strict=True
    ):
        masses = _masses(rows)
        if laws.any_min_p:
            masses.masked_fill_(rows < cutoffs.unsqueeze(1), 0)
        totals.append(masses.sum(dim=1))
    return torch.cat(totals)


def _masses(scaled: torch.Tensor) -> torch.Tensor:
    """Return exp(scaled) in units of 1 / _MASS_UNITS: int64 of the same shape.

    Sums of integers do not depend on their order, so the border of a nucleus is the same for every
    algorithm, batch and device.  On a CPU a mass is the float32 next to the exponential: torch's
    own is one of those beside it, as the processor has it.
    """
    exact = scaled.double().exp_().float() if scaled.device.type == "cpu" else scaled.exp()
    return exact.mul_(_MASS_UNITS).long()
