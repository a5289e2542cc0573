"""Noise is a published function of (seed, position, token, stream), the same everywhere."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.draw import (
    gumbel_of_words,
    gumbel_rows,
    gumbel_rows_eager,
    philox_words,
)
from cluster.spec.noise import gumbel, gumbel_row, philox, random_words

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

# By a Philox of plain integers that shares no code with the product.
VECTORS = json.loads((Path(__file__).parent / "noise_vectors.json").read_text())
COLUMNS = {name: [vector[name] for vector in VECTORS] for name in VECTORS[0]}


def keys(*triples: tuple[int, int, int]) -> torch.Tensor:
    """Seeds, positions and streams: int64[3, rows]."""
    return torch.from_numpy(np.array(triples, np.uint64).T.copy().view(np.int64))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: str
):
    words = philox(counter, key)

    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_numpy_noise_agrees_with_the_committed_vectors():
    places = [COLUMNS[name] for name in ("token_id", "position", "stream")]
    values = gumbel(COLUMNS["seed"], COLUMNS["position"], COLUMNS["token_id"], COLUMNS["stream"])

    assert random_words(COLUMNS["seed"], (*places, 0))[0].tolist() == COLUMNS["word"]
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, np.array(COLUMNS["gumbel"], np.float32), rtol=2e-7)


@given(
    seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**32 - 1), stream=st.integers(0, 64)
)
def test_numpy_and_torch_draw_identical_integers(seed: int, position: int, stream: int):
    words = random_words(seed, (np.arange(300), position, stream, 0))[0]
    other = philox_words(keys((seed, position, stream)), 300)

    assert np.array_equal(words.astype(np.int64), other[0].numpy())
    np.testing.assert_allclose(
        gumbel(seed, position, np.arange(300), stream), gumbel_of_words(other)[0].numpy(), rtol=1e-6
    )


def test_rows_equal_single_values():
    rows = gumbel_row(3, 0, 0, 10_000), gumbel_row(2**64 - 1, 9, 2, 10_000)

    for token in (0, 4096, 9_999):
        assert rows[0][token] == gumbel(3, 0, token)
        assert rows[1][token] == gumbel(2**64 - 1, 9, token, 2)


def test_noise_is_finite_at_the_extreme_words():
    values = gumbel_of_words(torch.tensor([0, ALL_ONES])).tolist()

    assert values == pytest.approx([22.873857, -3.129994], abs=1e-5)


def test_a_row_that_is_kept_is_not_changed_by_who_asked_for_it():
    before = gumbel_row(1, 0, 0, 10).copy()
    gumbel_rows(keys((1, 0, 0), (1, 0, 0)), 10).zero_()
    assert np.array_equal(gumbel_row(1, 0, 0, 10), before)
    with pytest.raises(ValueError, match="read-only"):
        gumbel_row(1, 0, 0, 10)[0] = 0.0


def test_many_rows_are_computed_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    sizes = []

    def counted(some: torch.Tensor, vocab_size: int) -> torch.Tensor:
        sizes.append(some.shape[1])
        return philox_words(some, vocab_size)

    monkeypatch.setattr("cluster.spec.draw.philox_words", counted)
    of_rows = keys(*((5, position, 1) for position in range(70)))
    rows = gumbel_rows_eager(of_rows, 40)

    assert max(sizes) <= 40
    np.testing.assert_allclose(rows.numpy(), gumbel_rows(of_rows, 40).numpy(), rtol=1e-6)
