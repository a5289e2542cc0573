"""Processed laws against a plain reference: one row at a time, full sorts, no shortcuts."""

from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cluster.core import SamplingParams, token_array
from cluster.spec.draw import drawing_bytes
from cluster.spec.logprobs import token_logprobs
from cluster.spec.sampling import (
    NUM_CANDIDATES,
    WORKSPACE_BYTES,
    RowLaws,
    among_greatest,
    scale,
    sorted_cutoffs,
    survivors,
)
from tests.support.choices import by_night

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
):
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
):
    generator = np.random.default_rng(seed)
    logits = generator.integers(0, num_levels, (len(params), 300)).astype(np.float32)

    found = product_survivors(logits, params)

    for row, law, alive in zip(logits, params, found, strict=True):
        assert alive == set(np.flatnonzero(row >= row[list(alive)].min()).tolist())
        assert len(alive ^ reference_survivors(row, law)) == 0 or law.top_p < 1


# Finding a law's border: by a sort, or among the greatest; the same to the bit.


EXTREME_LAWS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-3, 0.3, 0.7, 1.0, 1.9, 50.0]),
    top_p=st.sampled_from([1.0, 1 - 1e-7, 0.95, 0.75, 0.5, 0.25, 0.05, 1e-6]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 64, 100, 299, 300, 10_000]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
)
# What ties, and how masses are spread: equal halves put a border exactly where two sums meet.
ROWS = {
    "smooth": lambda random, size: random.standard_normal(size) * 3,
    "flat": lambda random, size: np.zeros(size),
    "levels": lambda random, size: random.integers(0, 4, size),
    "halves": lambda random, size: np.log(2.0) * -random.integers(0, 12, size),
    "banned": lambda random, size: np.where(random.random(size) < 0.9, -np.inf, 1.0),
    "two": lambda random, size: np.where(np.arange(size) % 150 == 3, 9.0, -200.0),
}


def _scaled(kinds: list[str], laws: RowLaws, seed: int, size: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    rows = np.stack([ROWS[kind](random, size) for kind in kinds]).astype(np.float32)
    rows[:, 0] = 1.0  # nothing is banned altogether
    logits = torch.from_numpy(rows)
    return scale(logits, logits.amax(1), laws.temperature)


@given(
    st.lists(st.tuples(EXTREME_LAWS, st.sampled_from(list(ROWS))), min_size=1, max_size=5),
    st.integers(0, 10_000),
    st.sampled_from([1, 5, 64, 299]),
    st.sampled_from([1, 2, 65, 300]),
)
def test_every_way_to_find_the_survivors_finds_the_same(
    rows: list[tuple[SamplingParams, str]], seed: int, num_candidates: int, vocab_size: int
):
    laws = RowLaws.of([params for params, _ in rows], CPU)
    scaled = _scaled([kind for _, kind in rows], laws, seed, vocab_size)
    expected = scaled >= sorted_cutoffs(scaled, laws).unsqueeze(1)
    assert expected.any(dim=1).all()

    found = survivors(scaled, laws, num_candidates)
    alive = scaled >= found.cutoffs.unsqueeze(1)
    assert torch.equal(alive, expected)
    # What the greatest settle by themselves is settled.
    quick, settled = among_greatest(scaled, laws, num_candidates)
    assert torch.equal((scaled >= quick.cutoffs.unsqueeze(1))[settled], expected[settled])
    # Where a row's candidates are complete they are all of its survivors.
    kept = (found.values >= found.cutoffs.unsqueeze(1)).sum(dim=1)
    assert torch.equal(kept[found.complete], alive.sum(dim=1)[found.complete])


class _Peak(TorchDispatchMode):
    """Bytes of the tensors that were made inside and lived at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in given:
                    self._alive.add(storage)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive))
        return output


@by_night
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_selection_takes_no_more_memory_than_a_draw_is_said_to(top_p: float):
    num_rows, vocab_size = 70, 100_000
    # So flat that every row is sorted.
    params = [SamplingParams(100.0, top_p=top_p, top_k=50_000)] * num_rows
    laws = RowLaws.of(params, CPU)
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(1))

    with _Peak() as memory:
        found = survivors(scale(logits, logits.amax(1), laws.temperature), laws, 512)
        assert not found.complete.any()

    of_scaled = logits.nbytes
    assert memory.peak > of_scaled
    assert memory.peak <= of_scaled + WORKSPACE_BYTES
    assert drawing_bytes(num_rows, vocab_size) >= memory.peak + 2 * logits.nbytes


# Log-probabilities are those of the raw law, most probable first.


# Two rows of probabilities; the logits are off by a constant per row, as raw logits are.
PROBS = np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4]])
LOGITS = torch.tensor(np.log(PROBS) + np.array([[3.0], [-7.0]]), dtype=torch.float32)


def test_each_emitted_token_has_its_log_probability():
    entries = token_logprobs(LOGITS, token_array([2, 3]), 0)
    assert [entry.top for entry in entries] == [(), ()]
    assert [entry.logprob for entry in entries] == pytest.approx(np.log([0.2, 0.4]), abs=1e-6)
    assert [entry.rank for entry in entries] == [2, 1]
    assert [entry.rank for entry in token_logprobs(LOGITS, token_array([0, 0]), 1)] == [1, 4]


def test_alternatives_come_most_probable_first_and_equal_ones_by_id():
    first, second = token_logprobs(LOGITS, token_array([0, 0]), 3)
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [token for token, _ in second.top] == [3, 1, 2]
    assert [value for _, value in second.top] == pytest.approx(np.log([0.4, 0.3, 0.2]), abs=1e-6)


def test_no_more_alternatives_are_reported_than_there_are_tokens():
    (entry,) = token_logprobs(LOGITS[:1], token_array([0]), 20)
    assert [token for token, _ in entry.top] == [0, 1, 2, 3]


def test_half_precision_is_normalised_in_single():
    half = LOGITS.to(torch.bfloat16)
    entries = token_logprobs(half, token_array([0, 1]), 4)
    same = token_logprobs(half.float(), token_array([0, 1]), 4)
    assert entries == same
