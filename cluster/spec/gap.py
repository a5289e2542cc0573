"""How far a token is from being drawn: what tells rounding from a fault."""

from __future__ import annotations

import math

import numpy as np
import torch

from cluster.core import SamplingParams
from cluster.spec.draw import Indices
from cluster.spec.noise import gumbel
from cluster.spec.noise_torch import Triple
from cluster.spec.sampling import RowLaws, scale, survivors


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
