"""The draw: argmax with shared noise, in every batch the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import SamplingParams, TokenArray
from cluster.spec.draw import DrawRows, begin_draw, winner_among
from cluster.spec.noise import gumbel_row
from cluster.spec.sampling import is_truncated, pack
from tests.spec.test_sampling import LAWS, reference_survivors

CPU = torch.device("cpu")


def rows_for(params: Sequence[SamplingParams], positions: Sequence[int]) -> DrawRows:
    return DrawRows(
        packed=np.array([pack(p) for p in params]),
        truncated=np.array([is_truncated(p) for p in params]),
        seeds=np.array([p.noise_key for p in params], dtype=np.uint64),
        positions=np.array(positions, dtype=np.int64),
        streams=np.array([p.stream for p in params], dtype=np.int64),
    )


def drawn(
    logits: np.ndarray, params: Sequence[SamplingParams], positions: Sequence[int]
) -> TokenArray:
    return begin_draw(torch.from_numpy(logits), rows_for(params, positions)).taken()


def random_logits(seed: int, rows: int, vocab_size: int, spread: float = 3.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((rows, vocab_size)) * spread).astype(np.float32)


@given(
    st.lists(LAWS, min_size=1, max_size=5),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.5, 3.0]),
)
def test_the_draw_is_the_argmax_of_scores_over_the_survivors(
    params: list[SamplingParams], seed: int, spread: float
) -> None:
    params = [SamplingParams(p.temperature, p.top_p, p.top_k, p.min_p, seed=seed) for p in params]
    logits = random_logits(seed % 1000, len(params), 400, spread)

    found = drawn(logits, params, range(len(params)))

    assert (found >= 0).all()
    for row, law in enumerate(params):
        alive = sorted(reference_survivors(logits[row], law))
        scores = logits[row] / law.temperature + gumbel_row(seed, row, 0, 400)
        best = scores[alive].max()
        # Rounding may decide between scores that are equal to float32, or at top_p's border.
        close = {token for token in alive if scores[token] > best - 1e-4}
        border = law.top_p < 1 and scores[found[row]] >= best - 1e-4
        assert int(found[row]) in close or border


@given(st.lists(LAWS | st.just(SamplingParams(0.0)), min_size=2, max_size=6), st.integers(0, 999))
def test_a_rows_draw_does_not_depend_on_its_batch(params: list[SamplingParams], seed: int) -> None:
    logits = random_logits(seed, len(params), 300)

    together = drawn(logits, params, range(len(params)))
    alone = [drawn(logits[i : i + 1], [params[i]], [i]) for i in range(len(params))]

    assert together.tolist() == [int(draws[0]) for draws in alone]


@pytest.mark.parametrize("vocab_size", [2, 64, 50_001])
@pytest.mark.parametrize("params", [SamplingParams(0.0), None])
def test_greedy_ties_go_to_the_lowest_token(vocab_size: int, params: SamplingParams | None) -> None:
    generator = np.random.default_rng(vocab_size)
    logits = generator.integers(0, 3, (40, vocab_size)).astype(np.float32)
    rows = None if params is None else rows_for([params] * 40, range(40))

    found = begin_draw(torch.from_numpy(logits), rows).taken()

    assert found.tolist() == logits.argmax(axis=1).tolist()


def test_sampled_ties_go_to_the_lowest_token_on_both_paths() -> None:
    # At this temperature the noise is far below one unit in the last place of the scaled logits,
    # so scores tie exactly between the candidates that are not the maximum's neighbours.
    logits = np.full((1, 200), -1.0, dtype=np.float32)
    logits[0, [150, 20, 90]] = 5.0
    noise = gumbel_row(3, 0, 0, 200)
    best = int(np.array([20, 90, 150])[noise[[20, 90, 150]].argmax()])

    few = drawn(logits, [SamplingParams(1e-30, top_k=3, seed=3)], [0])
    full = drawn(logits, [SamplingParams(1e-30, seed=3)], [0])

    assert few.tolist() == full.tolist() == [best]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(0.0), SamplingParams(1.0), SamplingParams(0.8, 0.9, 50)]
)
def test_a_row_without_a_finite_maximum_is_invalid_and_alone(
    bad: float, params: SamplingParams
) -> None:
    logits = random_logits(1, 3, 300)
    clean = drawn(logits, [params] * 3, [0, 1, 2])
    logits[1, 17 if bad > 0.0 or np.isnan(bad) else slice(None)] = bad  # or all are banned

    found = drawn(logits, [params] * 3, [0, 1, 2])

    assert (found >= 0).tolist() == [True, False, True]
    assert found[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.zeros((500, 6), dtype=np.float32)
    logits[:, 2] = -np.inf
    params = [SamplingParams(1.0, seed=seed) for seed in range(500)]

    assert 2 not in drawn(logits, params, [0] * 500).tolist()


@given(
    st.integers(0, 999),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 3),
)
def test_the_winner_among_some_tokens_is_the_draw_where_it_is_one_of_them(
    seed: int, temperature: float, position: int, stream: int
) -> None:
    logits = random_logits(seed, 1, 60)
    params = SamplingParams(temperature, seed=seed, stream=stream)
    (token,) = drawn(logits, [params], [position]).tolist()
    others = np.random.default_rng(seed).permutation(60)[:5].tolist()
    among = np.array(sorted({token, *others}), dtype=np.int64)

    row = torch.from_numpy(logits[0])
    assert winner_among(row, among, temperature, (seed, position, stream)) == token


def test_a_batch_of_greedy_and_sampled_rows_is_not_changed_by_the_draw() -> None:
    logits = torch.from_numpy(random_logits(3, 4, 50))
    before = logits.clone()
    params = [SamplingParams(0.0), SamplingParams(1.0), SamplingParams(0.0), SamplingParams(0.7)]

    found = begin_draw(logits, rows_for(params, range(4))).taken()

    assert torch.equal(logits, before)
    assert found.dtype == np.int32
    assert found[[0, 2]].tolist() == before.argmax(1)[[0, 2]].tolist()
