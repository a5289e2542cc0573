"""Noise is a published function of (seed, position, token, stream), the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.spec.noise import gumbel, gumbel_row, gumbel_rows, philox, split_seeds
from cluster.spec.noise_torch import gumbel_of_words, gumbel_rows_eager, philox_words
from cluster.spec.noise_torch import gumbel_rows as gumbel_rows_torch

CPU = torch.device("cpu")
ALL_ONES = 0xFFFFFFFF

# Random123's kat_vectors for philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]

VECTORS = json.loads((Path(__file__).parent / "noise_vectors.json").read_text())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: str
) -> None:
    words = philox(counter, key)

    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_numpy_noise_agrees_with_the_committed_vectors() -> None:
    columns = {name: [vector[name] for vector in VECTORS] for name in VECTORS[0]}

    words = philox(
        (columns["token_id"], columns["position"], columns["stream"], 0),
        split_seeds(columns["seed"]),
    )[0]
    values = gumbel(columns["seed"], columns["position"], columns["token_id"], columns["stream"])

    assert words.tolist() == columns["word"]
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, np.array(columns["gumbel"], np.float32), rtol=2e-7)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['seed']}-{v['position']}")
def test_torch_words_agree_with_the_committed_vectors(vector: dict[str, int]) -> None:
    row = philox_words(
        [vector["seed"]], [vector["position"]], [vector["stream"]], vector["token_id"] + 1, CPU
    )

    assert int(row[0, -1]) == vector["word"]


@given(
    seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**32 - 1), stream=st.integers(0, 64)
)
def test_numpy_and_torch_draw_identical_integers(seed: int, position: int, stream: int) -> None:
    words = philox((np.arange(300), position, stream, 0), split_seeds(seed))[0]
    other = philox_words([seed], [position], [stream], 300, CPU)

    assert np.array_equal(words.astype(np.int64), other[0].numpy())
    np.testing.assert_allclose(
        gumbel(seed, position, np.arange(300), stream), gumbel_of_words(other)[0].numpy(), rtol=1e-6
    )


def test_rows_equal_single_values_across_chunk_borders() -> None:
    rows = gumbel_rows([3, 2**64 - 1], [0, 9], [0, 2], 10_000)

    for token in (0, 1, 4095, 4096, 8191, 8192, 9_999):
        assert rows[0, token] == gumbel(3, 0, token)
        assert rows[1, token] == gumbel(2**64 - 1, 9, token, 2)


def test_a_negative_seed_counts_modulo_two_to_the_64() -> None:
    assert gumbel(-1, 4, 7) == gumbel(2**64 - 1, 4, 7)


def test_noise_is_finite_at_the_extreme_words() -> None:
    values = gumbel_of_words(torch.tensor([0, ALL_ONES])).tolist()

    assert values == pytest.approx([22.873857, -3.129994], abs=1e-5)


def test_noise_follows_the_gumbel_law() -> None:
    values = gumbel_rows(list(range(50)), [3] * 50, [0] * 50, 2_000).ravel()

    assert stats.kstest(values.astype(np.float64), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("changed", ["seed", "position", "stream"])
def test_each_coordinate_gives_independent_noise(changed: str) -> None:
    base = {"seed": 5, "position": 8, "stream": 0}
    token_ids = np.arange(20_000)

    one = gumbel(base["seed"], base["position"], token_ids, base["stream"])
    base[changed] += 1
    other = gumbel(base["seed"], base["position"], token_ids, base["stream"])

    assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(len(token_ids))


def test_a_row_that_is_kept_is_not_changed_by_who_asked_for_it() -> None:
    before = gumbel_row(1, 0, 0, 10).copy()
    gumbel_rows_torch([1, 1], [0, 0], [0, 0], 10, CPU).zero_()
    assert np.array_equal(gumbel_row(1, 0, 0, 10), before)
    with pytest.raises(ValueError, match="read-only"):
        gumbel_row(1, 0, 0, 10)[0] = 0.0


def test_noise_for_another_device_is_made_there() -> None:
    # The meta device computes nothing, but what is made elsewhere is seen.
    rows = gumbel_rows_torch([1, 2], [0, 0], [0, 0], 10, torch.device("meta"))
    assert (rows.device.type, rows.dtype, rows.shape) == ("meta", torch.float32, (2, 10))


class LargestTensor(TorchDispatchMode):
    """Notes the most rows of any tensor but the result."""

    num_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in (torch.int64, torch.float64):
            self.num_rows = max(self.num_rows, *result.shape[:1], 0)
        return result


def test_many_rows_are_computed_in_parts_of_bounded_size() -> None:
    positions = list(range(70))
    seeds, streams = [5] * 70, [1] * 70
    with LargestTensor() as largest:
        rows = gumbel_rows_eager(seeds, positions, streams, 40, CPU)

    assert largest.num_rows <= 40
    np.testing.assert_allclose(rows.numpy(), gumbel_rows(seeds, positions, streams, 40), rtol=1e-6)
