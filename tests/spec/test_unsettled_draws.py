"""On a GPU a truncated draw waits for its tokens alone, and is token for token that of a sort.

Rows whose survivors are not all among the greatest logits are told by the draw itself and drawn
again.  On a CPU a stand-in for the kernel makes `draw` go the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import SamplingParams
from cluster.spec.draw import begin_draw
from cluster.spec.noise_torch import gumbel_rows
from cluster.spec.sampling import NUM_CANDIDATES, scale
from tests.spec.test_draw import random_logits, rows_for
from tests.spec.test_selection import LAWS, ROWS


class Kernel:
    """A `FusedDraw` of plain operations.  calls: the number of rows of each."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self,
        logits: torch.Tensor,
        maxima: torch.Tensor,
        temperatures: torch.Tensor,
        cutoffs: torch.Tensor | None,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        self.calls.append(len(logits))
        scaled = scale(logits, maxima, temperatures)
        scores = scaled + gumbel_rows(keys, logits.shape[1])
        if cutoffs is not None:
            scores[scaled < cutoffs.unsqueeze(1)] = -torch.inf
        return scores.max(dim=1).indices


def _drawn(
    logits: np.ndarray, params: Sequence[SamplingParams]
) -> tuple[list[int], list[int], list[int]]:
    """The draws without the kernel and with it, and the rows of its calls."""
    kernel, rows = Kernel(), rows_for(params, range(len(params)))
    given = torch.from_numpy(logits)
    expected, found = (begin_draw(given, rows, fused).taken().tolist() for fused in (None, kernel))
    return expected, found, kernel.calls


@given(
    st.lists(
        st.tuples(LAWS | st.just(SamplingParams(0.0)), st.sampled_from(list(ROWS))),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**64 - 1),
    st.sampled_from([1, 2, 65, 300, 700]),
)
def test_the_draw_is_the_same_whether_the_host_waits_or_not(
    rows: list[tuple[SamplingParams, str]], seed: int, vocab_size: int
) -> None:
    random = np.random.default_rng(seed)
    logits = np.stack([ROWS[kind](random, vocab_size) for _, kind in rows]).astype(np.float32)
    params = [SamplingParams(p.temperature, p.top_p, p.top_k, p.min_p, seed=seed) for p, _ in rows]
    expected, found, _ = _drawn(logits, params)
    assert found == expected


@pytest.mark.parametrize(
    ("law", "is_again"),
    [
        (SamplingParams(1.0, top_k=NUM_CANDIDATES - 1, seed=1), False),
        (SamplingParams(1.0, top_k=NUM_CANDIDATES, seed=1), True),
        (SamplingParams(1.0, top_k=NUM_CANDIDATES + 1, seed=1), True),
        (SamplingParams(30.0, top_p=0.9, seed=1), True),
        (SamplingParams(0.1, top_p=0.9, seed=1), False),
        (SamplingParams(30.0, min_p=0.01, seed=1), False),
    ],
)
def test_only_rows_beyond_the_greatest_are_drawn_again(law: SamplingParams, is_again: bool) -> None:
    other = SamplingParams(0.1, top_k=3, seed=2)
    expected, found, calls = _drawn(random_logits(5, 3, 900), [other, law, other])
    assert found == expected
    assert calls == [3, 1] if is_again else [3]


def test_ties_beyond_the_greatest_are_drawn_among_them_all() -> None:
    logits = np.zeros((40, 4 * NUM_CANDIDATES), np.float32)
    params = [SamplingParams(1.0, top_k=2, seed=seed) for seed in range(40)]
    expected, found, calls = _drawn(logits, params)
    assert found == expected
    assert calls == [40, 40]
    assert max(found) >= NUM_CANDIDATES, "none is drawn that the greatest leave out"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_law_is_not_drawn_again(bad: float) -> None:
    logits = random_logits(1, 3, 300)
    logits[1] = bad
    _, found, calls = _drawn(logits, [SamplingParams(0.1, 0.9, seed=4)] * 3)
    assert [token >= 0 for token in found] == [True, False, True]
    assert found[1] == -1
    assert calls == [3]
