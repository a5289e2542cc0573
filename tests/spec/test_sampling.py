"""Processed laws against a plain reference: one row at a time, full sorts, no shortcuts."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import SamplingParams
from cluster.spec.sampling import NUM_CANDIDATES, RowLaws, scale, survivors

CPU = torch.device("cpu")


def reference_survivors(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """min_p, then top_k, then top_p, by their definitions; candidates that tie stay together."""
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    alive = np.ones(len(logits), dtype=bool)
    if params.min_p > 0:
        alive &= np.exp(scaled) >= params.min_p
    if 0 < params.top_k < alive.sum():
        alive &= logits >= np.sort(logits[alive])[-params.top_k]
    if params.top_p < 1:
        masses = np.where(alive, np.exp(scaled), 0.0)
        masses /= masses.sum()
        # A candidate stays while those strictly above it do not yet hold top_p.
        above = np.array([masses[logits > value].sum() for value in logits])
        alive &= above < params.top_p
    return set(np.flatnonzero(alive).tolist())


def product_survivors(logits: np.ndarray, params: list[SamplingParams]) -> list[set[int]]:
    rows = torch.from_numpy(logits)
    laws = RowLaws.of(params, CPU)
    scaled = scale(rows, rows.amax(1), laws.temperature)
    alive = scaled >= survivors(scaled, laws).cutoffs.unsqueeze(1)
    return [set(torch.nonzero(row).squeeze(1).tolist()) for row in alive]


LAWS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 5, 50, NUM_CANDIDATES, 100, 150, 400, 10_000]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)


@given(
    st.lists(LAWS, min_size=1, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from([0.5, 3.0, 8.0]),
    st.sampled_from([7, 64, 65, 400]),
)
def test_survivors_equal_the_reference(
    params: list[SamplingParams], seed: int, spread: float, vocab_size: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal((len(params), vocab_size)) * spread).astype(np.float32)

    found = product_survivors(logits, params)

    for row, law, alive in zip(logits, params, found, strict=True):
        expected = reference_survivors(row, law)
        # float32 sums may place the border one candidate off where a mass hits top_p exactly.
        assert len(alive ^ expected) <= (1 if law.top_p < 1 and law.top_k != 1 else 0)
        assert alive


@given(st.lists(LAWS, min_size=1, max_size=3), st.integers(0, 1000), st.integers(2, 6))
def test_equal_logits_stand_or_fall_together(
    params: list[SamplingParams], seed: int, num_levels: int
) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.integers(0, num_levels, (len(params), 300)).astype(np.float32)

    found = product_survivors(logits, params)

    for row, law, alive in zip(logits, params, found, strict=True):
        assert alive == set(np.flatnonzero(row >= row[list(alive)].min()).tolist())
        assert len(alive ^ reference_survivors(row, law)) == 0 or law.top_p < 1
