"""Ranks the tokens that a draft model expects the target to draw, from rows of logits, and says how
likely each of them is.

torch selects the most probable tokens of each row; all later steps are NumPy on a few dozen numbers
per row.

Scores are calibrated online, from the tokens that the target committed.  The probability that it
draws candidate i is modelled as coverage * softmax(scores / tau)_i.  tau grows with the mismatch of
the two models; coverage is the share of draws whose token is among the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import EMPTY_TOKENS, SamplingParams, TokenArray
from cluster.draft.vocabulary import DraftVocabulary
from cluster.engine.cpu import kernels
from cluster.engine.draw.native import RankedDraw
from cluster.records import record
from cluster.spec.noise import gumbel
from cluster.spec.params import divisor
from cluster.spec.penalties import TokenBias, single_precision_penalties

Array = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]


@record
class RowContext:
    """The conditions of the target's draw at one row.

    position: output position of the token to be drawn.  text: prompt and output before it; only
    penalties use them.
    """

    params: SamplingParams
    position: int
    text: tuple[TokenArray, TokenArray] = (EMPTY_TOKENS, EMPTY_TOKENS)


@record
class Ranking:
    """The candidates of one node, best first, or of several nodes, with a leading axis of rows.

    token_ids: int64[m], the target's.  scores: float64[m], log-weights at the request's temperature
    plus noise (greedy: logits without noise); -inf for tokens that the request's truncation
    removes.
    """

    token_ids: IdArray
    scores: Array

    def row(self, index: int) -> Ranking:
        """The candidates of one of several nodes."""
        return Ranking(self.token_ids[index], self.scores[index])

    def rank_of(self, token_id: int) -> int | None:
        """The rank of `token_id` among the candidates, None if it is not one of them."""
        places = np.flatnonzero(self.token_ids == token_id)
        is_candidate = len(places) > 0 and np.isfinite(self.scores[places[0]])
        return int(places[0]) if is_candidate else None


def rank_rows(
    logits: torch.Tensor,
    rows: Sequence[RowContext],
    num_candidates: int,
    vocabulary: DraftVocabulary | None = None,
) -> Ranking:
    """Rank the candidates of every row.

    logits: float32[rows, vocab].  vocabulary: whose columns they are, None = the target's.

    Noise is added only to the num_candidates most probable tokens, because a draft need not be
    exact.  The order of processing is that of `cluster.spec.sampling`.
    """
    # With a model on the CPU the kernels are already loaded; otherwise this would compile them.
    native = kernels.load() if logits.device.type == "cpu" else None
    count = min(num_candidates, logits.shape[1])
    if native is not None and count <= native.max_ranked and _are_unprocessed(logits, rows):
        columns, scores = native.rank(
            logits, count, [ranked_draw(row.params, row.position, vocabulary) for row in rows]
        )
        return Ranking(_target_ids(columns, vocabulary), scores)
    values, ids = torch.topk(_with_bias(logits, rows, vocabulary), count, dim=-1)
    weights = values.cpu().numpy().astype(np.float64)
    ranked = Ranking(_target_ids(ids.cpu().numpy(), vocabulary), weights)
    if any(row.params.has_penalties for row in rows):
        _penalise(ranked, rows)
        ranked = _ordered(ranked.token_ids, weights)
    return _ordered(ranked.token_ids, _scores(ranked, rows))


def _ordered(token_ids: IdArray, scores: Array) -> Ranking:
    """Best first."""
    order = np.argsort(-scores, axis=1, kind="stable")
    return Ranking(
        np.take_along_axis(token_ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
    )


def are_unprocessed(params: SamplingParams) -> bool:
    """True if draws need only temperature, truncation and noise: no logit bias, no penalties."""
    return not (params.logit_bias or params.has_penalties)


def _are_unprocessed(logits: torch.Tensor, rows: Sequence[RowContext]) -> bool:
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return False
    return all(map(are_unprocessed, {id(row.params): row.params for row in rows}.values()))


def ranked_draw(
    params: SamplingParams, position: int, vocabulary: DraftVocabulary | None
) -> RankedDraw:
    """The parameters of the target's draw at an output position, for the native kernels.

    They refer to the vocabulary's memory, so it has to live as long as they are used.
    """
    return RankedDraw(
        params.noise_key,
        position,
        params.stream,
        params.top_k,
        params.temperature,
        params.top_p,
        params.min_p,
        None if vocabulary is None else vocabulary.address,
    )


def _target_ids(columns: IdArray, vocabulary: DraftVocabulary | None) -> IdArray:
    return columns if vocabulary is None else vocabulary.target_ids[columns].astype(np.int64)


def _with_bias(
    logits: torch.Tensor, rows: Sequence[RowContext], vocabulary: DraftVocabulary | None
) -> torch.Tensor:
    if not any(row.params.logit_bias for row in rows):
        return logits
    biased, end = logits.clone(), 0
    for params, own in groupby(rows, attrgetter("params")):
        start, end = end, end + len(list(own))
        # A thousand tokens may have one, at dozens of rows: it is made once for those of a request.
        pairs = []
        for token, bias in params.logit_bias:
            column = token if vocabulary is None else vocabulary.draft_id_of(token)
            if column is not None and 0 <= column < logits.shape[1]:
                pairs.append((column, bias))
        TokenBias.of(pairs, logits.device).apply(biased[start:end])
    return biased


def _penalise(ranked: Ranking, rows: Sequence[RowContext]) -> None:
    """Apply the penalties to the candidates in place; no token becomes a new candidate."""
    for row, token_ids, scores in zip(rows, ranked.token_ids, ranked.scores, strict=True):
        if row.params.has_penalties:
            penalty, frequency, presence = single_precision_penalties(row.params)
            prompt, output = row.text
            counts = (output[:, None] == token_ids).sum(axis=0)
            if penalty != 1.0:
                is_there = (counts > 0) | np.isin(token_ids, prompt)
                repeated = np.where(scores > 0.0, scores / penalty, scores * penalty)
                scores[:] = np.where(is_there, repeated, scores)
            scores -= frequency * counts + presence * (counts > 0)


def _scores(ranked: Ranking, rows: Sequence[RowContext]) -> Array:
    """See `scored`.  float64[rows, m]."""
    params = [row.params for row in rows]
    divisors = np.array([[divisor(each)] for each in params])
    if not divisors.any():
        return ranked.scores
    law = {
        name: np.array([[getattr(each, name)] for each in params])
        for name in ("top_k", "top_p", "min_p")
    }
    noise = gumbel(
        np.array([[each.noise_key] for each in params], np.uint64),
        np.array([[row.position] for row in rows], np.int64),
        ranked.token_ids,
        np.array([[each.stream] for each in params], np.int64),
    )
    ranks = np.arange(ranked.scores.shape[1])
    return scored(np, ranked.scores, noise, ranks, law | {"divisor": divisors})


def scored(xp: Any, values: Any, noise: Any, ranks: Any, law: Mapping[str, Any]) -> Any:
    """Log-weights after temperature and truncation, plus noise; greedy ones as they are.

    xp: NumPy or torch, whose arrays are given.  values: float64[..., m], logits of candidates,
    descending.  noise: of these, likewise.  ranks: int64[m], 0 to m - 1.  law: of each row top_k,
    top_p, min_p and divisor (0 = greedy), [..., 1].

    -inf where top-k, top-p or min-p remove a token; the first always stays.  The candidates
    approximate the whole vocabulary: the mass of all other tokens is ignored.
    """
    is_sampled = law["divisor"] > 0.0
    scaled = values / xp.where(is_sampled, law["divisor"], 1.0)
    scaled = xp.where((law["top_k"] > 0) & (ranks >= law["top_k"]), -xp.inf, scaled)
    probs = xp.exp(scaled - scaled[..., :1])
    probs = probs / probs.sum(-1, keepdims=True)
    is_cut = probs.cumsum(-1) - probs >= law["top_p"]
    is_cut |= probs < law["min_p"] * probs[..., :1]
    drawn = xp.where(is_cut & (ranks > 0), -xp.inf, scaled + noise)
    return xp.where(is_sampled, drawn, values)


_INITIAL_TAU = 1.3
_TAU_BOUNDS = (0.05, 20.0)
# The longest step of log tau at the first draw, and the shortest one, by which it follows a drift.
_FIRST_STEP = 0.3
_LEAST_STEP = 0.02
# Weight of the initial coverage, and the number of observations after which it starts to forget.
_PRIOR_WEIGHT = 20.0
_MEMORY = 2000.0


class Sharpness:
    """The calibration, tau and coverage, of one kind of request.

    tau is fitted by gradient descent on the log-loss, from reached nodes only: the text has left
    the path at others because the drafter misjudged the context."""

    def __init__(self) -> None:
        self.tau = _INITIAL_TAU
        self._num_drawn = 0
        self._covered = _PRIOR_WEIGHT
        self._trials = _PRIOR_WEIGHT + 1.0

    @property
    def coverage(self) -> float:
        """Share of draws among the candidates; in (0, 1), so survival falls along every path."""
        return self._covered / self._trials

    def learn(self, scores: Array, rank: int | None) -> None:
        """Learn that the target drew candidate `rank` where the drafter had `scores`, descending.

        rank: None if the token was no candidate; this changes coverage but not tau.
        """
        if self._trials >= _MEMORY:
            self._trials *= 0.5
            self._covered *= 0.5
        self._trials += 1.0
        if rank is None:
            return
        self._covered += 1.0
        self._num_drawn += 1
        possible = scores[np.isfinite(scores)]
        # d(-log share of the drawn) / d(log tau) = (its score - mean score) / tau
        mean = _softmax(possible / self.tau) @ possible
        slope = max(-2.0, min(2.0, float(possible[rank] - mean) / self.tau))
        step = max(_FIRST_STEP / math.sqrt(self._num_drawn), _LEAST_STEP) * slope
        self.tau = max(_TAU_BOUNDS[0], min(_TAU_BOUNDS[1], self.tau * math.exp(-step)))


def conditionals(scores: Array, fits: Sequence[Sharpness]) -> Array:
    """coverage * softmax(scores / tau), row by row.

    scores: float64[rows, m], divided by the temperature and with the noise, the first of each row
    finite.  fits: of each row.  Returns float64[rows, m].
    """
    taus = np.array([[fit.tau] for fit in fits])
    coverages = np.array([[fit.coverage] for fit in fits])
    return _softmax(scores / taus) * coverages


def _softmax(values: Array) -> Array:
    weights = np.exp(values - values.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
