from __future__ import annotations

import numpy as np
import pytest

from cluster.draft.sharpness import Sharpness


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_tau_and_coverage_are_recovered_from_draws(tau: float) -> None:
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


def test_truncated_candidates_do_not_disturb_the_fit() -> None:
    sharpness = Sharpness()
    for _ in range(100):
        sharpness.learn(np.array([2.0, 1.0, -np.inf]), 0)
    assert np.isfinite(sharpness.tau)
    assert sharpness.tau < 1.3
    assert 0.95 < sharpness.coverage < 1.0
