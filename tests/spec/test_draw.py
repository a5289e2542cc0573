"""The draw: argmax with shared noise, in every batch the same."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import SamplingParams, TokenArray
from cluster.spec.draw import DrawRows, begin_draw, gap_of, gumbel_rows, winner_among
from cluster.spec.noise import gumbel_row
from cluster.spec.sampling import NUM_CANDIDATES, scale
from tests.spec.test_sampling import EXTREME_LAWS, LAWS, ROWS, reference_survivors

CPU = torch.device("cpu")


def rows_for(params: Sequence[SamplingParams], positions: Sequence[int]) -> DrawRows:
    return DrawRows.of(params, np.array(positions, np.int64)[:, None])


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
):
    params = [replace(each, seed=seed, stream=seed % 3) for each in params]
    logits = random_logits(seed % 1000, len(params), 400, spread)

    found = drawn(logits, params, range(len(params)))

    assert (found >= 0).all()
    for row, law in enumerate(params):
        alive = sorted(reference_survivors(logits[row], law))
        scores = logits[row] / law.temperature + gumbel_row(seed, row, seed % 3, 400)
        best = scores[alive].max()
        # Rounding may decide between scores that are equal to float32, or at top_p's border.
        close = {token for token in alive if scores[token] > best - 1e-4}
        border = law.top_p < 1 and scores[found[row]] >= best - 1e-4
        assert int(found[row]) in close or border


@given(st.lists(LAWS | st.just(SamplingParams(0.0)), min_size=2, max_size=6), st.integers(0, 999))
def test_a_rows_draw_does_not_depend_on_its_batch(params: list[SamplingParams], seed: int):
    logits = random_logits(seed, len(params), 300)

    before = logits.copy()
    together = drawn(logits, params, range(len(params)))
    assert together.dtype == np.int32
    assert np.array_equal(logits, before)
    alone = [drawn(logits[i : i + 1], [params[i]], [i]) for i in range(len(params))]

    assert together.tolist() == [int(draws[0]) for draws in alone]


@pytest.mark.parametrize("vocab_size", [2, 64, 50_001])
@pytest.mark.parametrize("params", [SamplingParams(0.0), None])
def test_greedy_ties_go_to_the_lowest_token(vocab_size: int, params: SamplingParams | None):
    generator = np.random.default_rng(vocab_size)
    logits = generator.integers(0, 3, (40, vocab_size)).astype(np.float32)
    rows = None if params is None else rows_for([params] * 40, range(40))

    found = begin_draw(torch.from_numpy(logits), rows).taken()

    assert found.tolist() == logits.argmax(axis=1).tolist()


def test_sampled_ties_go_to_the_lowest_token_on_both_paths():
    # At this temperature the noise is far below one unit in the last place of the scaled logits,
    # so scores tie exactly between the candidates that are not the maximum's neighbours.
    logits = np.full((1, 200), -1.0, np.float32)
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
def test_a_row_without_a_finite_maximum_is_invalid_and_alone(bad: float, params: SamplingParams):
    logits = random_logits(1, 3, 300)
    clean = drawn(logits, [params] * 3, [0, 1, 2])
    logits[1, 17 if bad > 0.0 or np.isnan(bad) else slice(None)] = bad  # or all are banned

    found = drawn(logits, [params] * 3, [0, 1, 2])

    assert (found >= 0).tolist() == [True, False, True]
    assert found[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_banned_tokens_are_never_drawn():
    logits = np.zeros((500, 6), np.float32)
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
):
    logits = random_logits(seed, 1, 60)
    params = SamplingParams(temperature, seed=seed, stream=stream)
    (token,) = drawn(logits, [params], [position]).tolist()
    others = np.random.default_rng(seed).permutation(60)[:5].tolist()
    among = np.array(sorted({token, *others}), np.int64)

    row = torch.from_numpy(logits[0])
    assert winner_among(row, among, temperature, (seed, position, stream)) == token


# The gap of a token: the least change of logits that makes it the drawn one.


VOCAB_SIZE = 24
TRIPLE = (7, 3, 1)
SAMPLED = SamplingParams(temperature=0.7, seed=TRIPLE[0], stream=TRIPLE[2])


def winner_of(logits: torch.Tensor, params: SamplingParams) -> int:
    return int(drawn(logits.unsqueeze(0).numpy(), [params], [TRIPLE[1]])[0])


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SAMPLED, replace(SAMPLED, temperature=1.6)],
    ids=["greedy", "sampled", "hot"],
)
def test_a_token_that_gains_more_than_its_gap_is_drawn_and_else_not(params: SamplingParams):
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        logits = torch.randn(VOCAB_SIZE, generator=generator)
        winner = winner_of(logits, params)
        for token in (each for each in range(VOCAB_SIZE) if each != winner):
            gap = gap_of(logits, winner, token, params, TRIPLE)
            raised = logits.clone()
            raised[token] += gap - 1e-3
            assert winner_of(raised, params) != token
            raised[token] += 2e-3
            assert winner_of(raised, params) == token


def test_a_token_at_the_border_of_the_law_is_near():
    logits = torch.full((VOCAB_SIZE,), -20.0)
    logits[:3] = torch.tensor([1.0, 0.5, 0.4999])
    params = replace(SAMPLED, top_k=2)
    # Among the two that are kept, and with the third that nearly was.
    winner = winner_of(logits, params)
    assert gap_of(logits, winner, 5, params, TRIPLE) > 10.0
    for kept, other in ((1, 2), (0, 1)):
        ahead = gap_of(logits, kept, other, params, TRIPLE)
        assert 0.0 <= ahead < math.inf
    # Where the one that is drawn is the last that is kept, a little less would have banned it.
    assert gap_of(logits, 1, 0, params, TRIPLE) == 0.0


def test_a_banned_token_is_out_of_reach():
    logits = torch.zeros(VOCAB_SIZE)
    logits[4] = -torch.inf
    for params in (SAMPLED, SamplingParams(temperature=0.0)):
        assert gap_of(logits, 0, 4, params, TRIPLE) == math.inf


# On a GPU a truncated draw waits for its tokens alone, and is token for token that of a sort.


class Kernel:
    """A `FusedDraw` of plain operations.  calls: the number of rows of each."""

    def __init__(self) -> None:
        self.calls = []

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
        st.tuples(EXTREME_LAWS | st.just(SamplingParams(0.0)), st.sampled_from(list(ROWS))),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**64 - 1),
    st.sampled_from([1, 2, 65, 300, 700]),
)
def test_the_draw_is_the_same_whether_the_host_waits_or_not(
    rows: list[tuple[SamplingParams, str]], seed: int, vocab_size: int
):
    random = np.random.default_rng(seed)
    logits = np.stack([ROWS[kind](random, vocab_size) for _, kind in rows]).astype(np.float32)
    params = [replace(each, seed=seed) for each, _ in rows]
    expected, found, _ = _drawn(logits, params)
    assert found == expected


@pytest.mark.parametrize(
    ("law", "is_again"),
    [
        (SamplingParams(1.0, seed=1), False),
        (SamplingParams(1.0, top_k=NUM_CANDIDATES - 1, seed=1), False),
        (SamplingParams(1.0, top_k=NUM_CANDIDATES, seed=1), True),
        (SamplingParams(1.0, top_k=NUM_CANDIDATES + 1, seed=1), True),
        (SamplingParams(30.0, top_p=0.9, seed=1), True),
        (SamplingParams(0.1, top_p=0.9, seed=1), False),
        (SamplingParams(30.0, min_p=0.01, seed=1), False),
    ],
)
def test_only_rows_beyond_the_greatest_are_drawn_again(law: SamplingParams, is_again: bool):
    other = SamplingParams(0.1, top_k=3, seed=2)
    expected, found, calls = _drawn(random_logits(5, 3, 900), [other, law, other])
    assert found == expected
    assert calls == [3, 1] if is_again else [3]


def test_ties_beyond_the_greatest_are_drawn_among_them_all():
    logits = np.zeros((40, 4 * NUM_CANDIDATES), np.float32)
    params = [SamplingParams(1.0, top_k=2, seed=seed) for seed in range(40)]
    expected, found, calls = _drawn(logits, params)
    assert found == expected
    assert calls == [40, 40]
    assert max(found) >= NUM_CANDIDATES, "none is drawn that the greatest leave out"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_law_is_not_drawn_again(bad: float):
    logits = random_logits(1, 3, 300)
    logits[1] = bad
    _, found, calls = _drawn(logits, [SamplingParams(0.1, 0.9, seed=4)] * 3)
    assert [token >= 0 for token in found] == [True, False, True]
    assert found[1] == -1
    assert calls == [3]
