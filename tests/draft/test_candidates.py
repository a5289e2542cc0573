"""With every token a candidate, the ranking is the target's own draw; how sure scores
are is learnt."""

import numpy as np
import pytest
import torch

from cluster.core import SamplingParams
from cluster.draft.candidates import RowContext, Sharpness, rank_rows
from cluster.engine.cpu import kernels
from cluster.spec.noise import gumbel
from tests.support.engine.native import needs_native

VOCAB = 64

LAWS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.0, seed=2**63 + 1, stream=2, top_k=5),
    SamplingParams(temperature=0.7, seed=3, top_p=0.6),
    SamplingParams(temperature=1.2, seed=4, min_p=0.2),
    SamplingParams(temperature=1.0, seed=4, top_k=9, top_p=0.8, min_p=0.05),
]


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.0


def plain_scores(row: np.ndarray, params: SamplingParams, position: int) -> np.ndarray:
    """The target's scores for one row, computed directly: -inf for tokens that cannot be drawn."""
    if params.temperature == 0.0:
        return row
    scaled = row / params.temperature
    order = np.argsort(-scaled, kind="stable")
    allowed = np.ones(VOCAB, dtype=bool)
    if params.top_k:
        allowed[order[params.top_k :]] = False
    probs = np.exp(np.where(allowed, scaled, -np.inf) - scaled.max())
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    allowed[order[before >= params.top_p]] = False
    allowed &= probs >= params.min_p * probs.max()
    noise = gumbel(params.noise_key, position, np.arange(VOCAB), params.stream)
    return np.where(allowed, scaled + noise, -np.inf)


@pytest.mark.parametrize("params", LAWS)
def test_ranking_all_tokens_gives_the_targets_scores_with_noise(params: SamplingParams):
    rows = logits(6)
    ranked = rank_rows(rows, [RowContext(params, position) for position in range(6)], VOCAB)
    for position in range(6):
        expected = plain_scores(rows[position].double().numpy(), params, position)
        ranking = ranked.row(position)
        assert ranking.scores == pytest.approx(expected[ranking.token_ids], abs=1e-5)
        assert ranking.token_ids[0] == int(np.argmax(expected))
        assert (np.diff(ranking.scores[np.isfinite(ranking.scores)]) <= 0).all()


def test_every_row_is_ranked_with_the_parameters_of_its_request():
    rows = logits(len(LAWS))
    contexts = [RowContext(params, 3) for params in LAWS]
    together = rank_rows(rows, contexts, 16)
    for index, context in enumerate(contexts):
        alone = rank_rows(rows[index : index + 1], [context], 16).row(0)
        assert np.array_equal(together.row(index).token_ids, alone.token_ids)
        assert np.array_equal(together.row(index).scores, alone.scores)


def test_a_bias_adds_a_candidate_and_does_not_change_the_logits():
    rows = logits(1)
    least = int(rows[0].argmin())
    params = SamplingParams(temperature=0.0, logit_bias=((least, 100.0),))
    before = rows.clone()
    ranking = rank_rows(rows, [RowContext(params, 0)], 4).row(0)
    assert ranking.token_ids[0] == least
    assert torch.equal(rows, before)
    assert ranking.scores[0] == pytest.approx(float(rows[0, least]) + 100.0, abs=1e-4)


@needs_native
@pytest.mark.parametrize("vocab_size", [40, 1000, 4099])
def test_kernels_rank_as_numpy_does(vocab_size: int, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(vocab_size)
    padded = 3.0 * torch.randn(8, vocab_size + 5)
    padded[2, : vocab_size - 20] = -torch.inf  # fewer possible tokens than candidates
    batch = padded[:, :vocab_size]
    temperatures = (0.0, 0.8, 1.0, 0.3, 0.0, 1.7, 0.8, 0.8)
    rows = [
        RowContext(SamplingParams(temperature=temperature, seed=2**63 + index, stream=index), index)
        for index, temperature in enumerate(temperatures)
    ]
    found = rank_rows(batch, rows, 32)
    monkeypatch.setattr(kernels, "load", lambda: None)
    expected = rank_rows(batch, rows, 32)
    possible = np.isfinite(expected.scores)
    np.testing.assert_array_equal(np.isfinite(found.scores), possible)
    np.testing.assert_array_equal(found.token_ids[possible], expected.token_ids[possible])
    np.testing.assert_allclose(found.scores[possible], expected.scores[possible], atol=1e-4)


@needs_native
def test_equal_logits_are_ordered_by_token_id():
    ranked = rank_rows(torch.zeros(1, 100), [RowContext(SamplingParams(temperature=0.0), 0)], 8)
    assert ranked.token_ids[0].tolist() == list(range(8))
    assert not ranked.scores.any()


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_tau_and_coverage_are_recovered_from_draws(tau: float):
    generator, sharpness = np.random.default_rng(0), Sharpness()
    taus = []
    for index in range(4000):
        scores = -np.sort(-generator.normal(0.0, 3.0, 16))
        probs = np.exp(scores / tau)
        rank = int(generator.choice(16, p=probs / probs.sum()))
        sharpness.learn(scores, rank if index % 4 else None)
        taus.append(sharpness.tau)
    assert np.mean(taus[-1000:]) == pytest.approx(tau, rel=0.15)
    assert sharpness.coverage == pytest.approx(0.75, abs=0.03)


def test_truncated_candidates_do_not_disturb_the_fit():
    sharpness = Sharpness()
    for _ in range(100):
        sharpness.learn(np.array([2.0, 1.0, -np.inf]), 0)
    assert np.isfinite(sharpness.tau)
    assert sharpness.tau < 1.3
    assert 0.95 < sharpness.coverage < 1.0
