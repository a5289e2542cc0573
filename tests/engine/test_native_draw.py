"""The native search for a draw's winner: the draws are those of the whole noise, to the token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.engine.native import kernels as native
from cluster.engine.native.kernels import Kernels
from cluster.spec.draw import DrawRows, draw
from cluster.spec.noise import gumbel, gumbel_rows
from cluster.spec.noise_torch import NoiseRows

pytestmark = pytest.mark.skipif(native.load() is None, reason="needs a C++ compiler")

CPU = torch.device("cpu")


@pytest.fixture
def kernels() -> Kernels:
    loaded = native.load()
    assert loaded is not None
    return loaded


def rows_of(generator: np.random.Generator, count: int, temperatures: list[float]) -> DrawRows:
    packed = np.zeros((count, 4))
    packed[:, 0] = generator.choice(temperatures, count)
    packed[:, 2] = 1.0
    seeds = generator.integers(0, 2**64, count, dtype=np.uint64)
    return DrawRows(
        packed, np.zeros(count, dtype=np.bool_), seeds,
        generator.integers(0, 5000, count), generator.integers(0, 4, count),
    )  # fmt: skip


@pytest.mark.parametrize("vocab_size", [1, 7, 50, 4096, 4100])
@pytest.mark.parametrize("spread", [0.0, 0.01, 4.0])
def test_draws_are_those_of_the_whole_noise(
    kernels: Kernels, vocab_size: int, spread: float
) -> None:
    generator = np.random.default_rng(vocab_size)
    rows = rows_of(generator, 64, [0.0, 1e-3, 0.8, 1.0, 2.0])
    logits = torch.from_numpy(generator.standard_normal((64, vocab_size)).astype(np.float32))
    logits *= spread
    logits[3, 0] = torch.nan
    logits[4, :] = -torch.inf
    logits[5, ::2] = -torch.inf
    noise = NoiseRows(vocab_size, CPU)
    expected, found = draw(logits, rows, noise), draw(logits, rows, noise, kernels.draws.finalists)
    assert found.valid.tolist() == expected.valid.tolist()
    assert found.token_ids[found.valid].tolist() == expected.token_ids[expected.valid].tolist()


def test_near_ties_are_decided_by_the_exact_noise(kernels: Kernels) -> None:
    """Logits that undo the noise but for a rounding error: everybody is a finalist somewhere."""
    generator = np.random.default_rng(9)
    rows = rows_of(generator, 400, [1.0])
    exact = gumbel_rows(rows.seeds.tolist(), rows.positions.tolist(), rows.streams.tolist(), 8)
    logits = torch.from_numpy(-exact)
    noise = NoiseRows(8, CPU)
    _, counts = kernels.draws.finalists(
        logits, logits.amax(dim=1), torch.ones(400), rows.seeds, rows.positions, rows.streams
    )
    assert counts.min() == 8
    found = draw(logits, rows, noise, kernels.draws.finalists)
    assert found.token_ids.tolist() == draw(logits, rows, noise).token_ids.tolist()


def test_more_finalists_than_are_kept_are_left_to_the_whole_noise(kernels: Kernels) -> None:
    rows = rows_of(np.random.default_rng(11), 2, [1.0])
    exact = gumbel_rows(rows.seeds.tolist(), rows.positions.tolist(), rows.streams.tolist(), 300)
    logits = torch.from_numpy(-exact)
    noise = NoiseRows(300, CPU)
    found = draw(logits, rows, noise, kernels.draws.finalists)
    assert found.token_ids.tolist() == draw(logits, rows, noise).token_ids.tolist()


def test_its_noise_is_far_more_exact_than_the_margin_asks(kernels: Kernels) -> None:
    generator = np.random.default_rng(12)
    num_rows, vocab_size = 100, 20_000
    rows = rows_of(generator, num_rows, [1.0])
    exact = gumbel_rows(
        rows.seeds.tolist(), rows.positions.tolist(), rows.streams.tolist(), vocab_size
    )
    logits, zeros, ones = torch.zeros(num_rows, vocab_size), torch.zeros(100), torch.ones(100)
    scores = torch.empty(num_rows, vocab_size)
    ids, counts = np.empty((num_rows, 1), np.int64), np.empty(num_rows, np.int64)
    kernels.draws._draw_finalists(
        logits.data_ptr(), zeros.data_ptr(), ones.data_ptr(),
        rows.seeds.ctypes.data, rows.positions.ctypes.data, rows.streams.ctypes.data,
        num_rows, vocab_size, 1e-3, 1, scores.data_ptr(), ids.ctypes.data, counts.ctypes.data, 2,
    )  # fmt: skip
    assert float(np.abs(scores.numpy() - exact).max()) < 1e-5


@pytest.mark.parametrize("width", [1, 5, 16, 33])
def test_single_tokens_have_their_noise(kernels: Kernels, width: int) -> None:
    generator = np.random.default_rng(width)
    rows = rows_of(generator, 20, [1.0])
    ids = generator.integers(0, 200_000, (20, width))
    expected = gumbel(rows.seeds[:, None], rows.positions[:, None], ids, rows.streams[:, None])
    found = kernels.draws.gumbel(rows.seeds, rows.positions, ids, rows.streams)
    np.testing.assert_allclose(found, expected, atol=1e-5)
