"""From the target's logits to its law at every row: temperature and truncation.

The whole order, vLLM's (V1 sampler), over float32 logits:

    1. logit_bias                     (`penalties.py`)
    2. repetition, then frequency and presence penalties, over the row's own path
    3. stop ids are banned while fewer than min_tokens are out
    4. temperature 0: argmax of what stands here; else division by the temperature
    5. min_p, then top_k, then top_p (top_p counts mass among the survivors of the two before it)

Candidates with equal logits stand or fall together at the borders of top_k and top_p, so the set
of survivors does not depend on how a sort breaks ties, nor on the batch around a row.  Each of
the three filters keeps exactly the candidates from some logit upwards, so a row's survivors are
described by one number, its cutoff.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cluster.core import SamplingParams

# Most laws keep fewer candidates than this; finding so few is much cheaper than a whole sort.
NUM_CANDIDATES = 64


@dataclass(frozen=True, slots=True, eq=False)
class RowLaws:
    """Temperature and truncation per row, every tensor of shape [rows].

    temperature: float32, positive.  top_k: int64, 0 = off.  top_p: float64, 1 = off.
    min_cutoff: float32, min_p as a bound on the scaled logits, -inf = off.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_cutoff: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowLaws:
        """The laws of one row per entry of `params`."""
        return cls.unpack(torch.tensor([pack(p) for p in params], dtype=torch.float64), device)

    @classmethod
    def unpack(cls, packed: torch.Tensor, device: torch.device) -> RowLaws:
        """packed: float64[rows, 4], each row made by `pack`; one transfer to `device`."""
        columns = packed.to(device)
        return cls(
            columns[:, 0].float(),
            columns[:, 1].long(),
            columns[:, 2],
            columns[:, 3].log().float(),
        )

    def take(self, rows: torch.Tensor) -> RowLaws:
        """The laws of the rows with these indices."""
        return RowLaws(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_cutoff[rows]
        )


def pack(params: SamplingParams) -> tuple[float, float, float, float]:
    """What a row's law depends on after penalties and bias, as plain numbers."""
    return (params.temperature, float(params.top_k), params.top_p, params.min_p)


def is_truncated(params: SamplingParams) -> bool:
    """Whether a law drops candidates, so that a few of them usually hold all of its mass."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def scale(logits: torch.Tensor, maxima: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - row maximum) / temperature: float32[rows, vocab], at most 0.

    Shifting first keeps tiny temperatures from overflowing to anything but -inf.
    """
    return (logits - maxima.unsqueeze(1)).div_(temperature.unsqueeze(1))


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Who may be drawn at each row: the candidates whose scaled logit is at least the cutoff.

    cutoffs: float32[rows].  values, token_ids: [rows, width], each row's greatest scaled logits,
    descending.  complete: bool[rows], all of the row's survivors stand among them.
    """

    cutoffs: torch.Tensor
    values: torch.Tensor
    token_ids: torch.Tensor
    complete: torch.Tensor

    def take(self, rows: torch.Tensor) -> Survivors:
        """The rows with these indices."""
        return Survivors(
            self.cutoffs[rows], self.values[rows], self.token_ids[rows], self.complete[rows]
        )


def survivors(scaled: torch.Tensor, laws: RowLaws) -> Survivors:
    """Truncate every row of `scaled` (float32[rows, vocab], maximum 0) by its own law.

    On a CPU most rows are settled by their NUM_CANDIDATES greatest logits, and only the others
    are sorted; on a GPU that question would cost a synchronisation, so all rows are sorted.
    """
    vocab_size = scaled.shape[1]
    width = min(NUM_CANDIDATES, vocab_size) if scaled.device.type == "cpu" else vocab_size
    values, token_ids = _greatest(scaled, width)
    cutoffs = _cutoffs(values, scaled, laws)
    if width == vocab_size:
        complete = torch.ones_like(cutoffs, dtype=torch.bool)
        return Survivors(cutoffs, values, token_ids, complete)
    # A kept last value means that more may follow: a longer nucleus, or ties with it.
    complete = values[:, -1] < cutoffs
    rest = torch.nonzero(~complete).squeeze(1)
    if len(rest):
        rows, row_laws = scaled[rest], laws.take(rest)
        cutoffs[rest] = _cutoffs(_sorted(rows), rows, row_laws)
    return Survivors(cutoffs, values, token_ids, complete)


def _greatest(scaled: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    if width == scaled.shape[1]:
        values, token_ids = scaled.sort(dim=1, descending=True)
    else:
        values, token_ids = scaled.topk(width, dim=1)
    return values, token_ids


def _sorted(scaled: torch.Tensor) -> torch.Tensor:
    """Each CPU row, descending.  NumPy's vectorised sort is several times faster than torch's."""
    ascending = np.sort(scaled.numpy(), axis=1)
    return torch.from_numpy(np.ascontiguousarray(ascending[:, ::-1]))


def _cutoffs(values: torch.Tensor, scaled: torch.Tensor, laws: RowLaws) -> torch.Tensor:
    """float32[rows]: the cutoffs, or a number no value is below where `values` cannot tell.

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
    if bool(nucleus.any()):
        masses = values.exp().double().masked_fill_(values < cutoffs.unsqueeze(1), 0.0)
        cumulated = masses.cumsum(dim=1)
        # With top_k the sorted values hold all the mass; summing the same prefix whatever the
        # width makes the total independent of it.  Without top_k the whole row is summed.
        total = torch.where(counted, cumulated[:, -1], _mass(scaled, laws.min_cutoff))
        kept = (cumulated - masses) < (laws.top_p * total).unsqueeze(1)
        num_kept = kept.sum(dim=1, keepdim=True).clamp_(min=1)
        smallest = values.gather(1, num_kept - 1).squeeze(1)
        cutoffs = torch.where(nucleus, torch.maximum(cutoffs, smallest), cutoffs)
    return cutoffs.masked_fill_(unknown, -torch.inf)


def _mass(scaled: torch.Tensor, min_cutoff: torch.Tensor) -> torch.Tensor:
    """Sum of exp over the candidates that min_p keeps: float64[rows]."""
    masses = scaled.exp()
    if bool((min_cutoff > -torch.inf).any()):
        masses.masked_fill_(scaled < min_cutoff.unsqueeze(1), 0.0)
    return masses.sum(dim=1, dtype=torch.float64)


def probabilities(logits: torch.Tensor, laws: RowLaws) -> torch.Tensor:
    """The law itself, float64[rows, vocab]: what drawing with noise samples from.

    The serving path never needs it; tests and audits compare against it.
    """
    scaled = scale(logits, logits.amax(dim=1), laws.temperature)
    cutoffs = survivors(scaled, laws).cutoffs.unsqueeze(1)
    return scaled.double().masked_fill(scaled < cutoffs, -torch.inf).softmax(dim=1)
