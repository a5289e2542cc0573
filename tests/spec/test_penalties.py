"""Penalties, bias and bans against the text-book definition, token by token."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, token_array
from cluster.spec.draw import winner_among
from cluster.spec.penalties import Counts, PenalisedRows, TokenBias, ban, penalise
from cluster.spec.sampling import RowLaws, scale, sorted_cutoffs, survivors
from tests.spec.test_draw import drawn, random_logits
from tests.support.spec.trees import paths, token_trees

CPU = torch.device("cpu")
VOCAB_SIZE = 6

PENALTIES = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)


def by_definition(
    row: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams
) -> list[float]:
    adjusted = row.astype(np.float64).tolist()
    for token in range(len(row)):
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            adjusted[token] *= penalty if adjusted[token] <= 0 else 1 / penalty
        adjusted[token] -= params.frequency_penalty * output.count(token)
        adjusted[token] -= params.presence_penalty * (token in output)
    return adjusted


@given(
    st.lists(st.tuples(TOKENS, TOKENS, token_trees(max_nodes=6), PENALTIES), min_size=1, max_size=3)
)
def test_every_row_is_penalised_by_its_own_path(
    sequences: list[tuple[list[int], list[int], TokenTree, SamplingParams]],
):
    num_rows = sum(len(tree) + 1 for _, _, tree, _ in sequences)
    logits = np.random.default_rng(1).standard_normal((num_rows, VOCAB_SIZE)).astype(np.float32)
    entries, expected = [], []
    for prompt, output, tree, params in sequences:
        start = len(expected)
        counts = Counts.of(token_array(prompt), token_array(output), VOCAB_SIZE, CPU)
        entries.append(PenalisedRows(start, counts, params, tree))
        for path in [(), *paths(tree)]:
            row = logits[len(expected)]
            expected.append(by_definition(row, prompt, [*output, *path], params))

    adjusted = torch.from_numpy(logits.copy())
    penalise(adjusted, entries)

    np.testing.assert_allclose(adjusted.numpy(), np.array(expected), rtol=1e-5, atol=1e-6)


def test_counting_on_equals_counting_from_the_start():
    counts = Counts.of(token_array([1, 2]), token_array([3]), VOCAB_SIZE, CPU)
    counts.add(token_array([3, 4, 4]))

    whole = Counts.of(token_array([1, 2]), token_array([3, 3, 4, 4]), VOCAB_SIZE, CPU)
    assert torch.equal(counts.output, whole.output)
    assert torch.equal(counts.seen, whole.seen)
    assert counts.output.tolist() == [0, 0, 0, 2, 2, 0]


def test_penalties_leave_banned_tokens_banned_and_other_rows_alone():
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 0] = -torch.inf
    counts = Counts.of(token_array([0]), token_array([0, 1]), VOCAB_SIZE, CPU)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)

    penalise(logits, [PenalisedRows(1, counts, params, EMPTY_TREE)])

    assert logits[0].tolist() == [-np.inf, 0, 0, 0, 0, 0]
    assert logits[1].tolist() == [-np.inf, -1, 0, 0, 0, 0]


def test_bias_adds_up_and_a_ban_is_final():
    logits = torch.zeros(2, 4)

    TokenBias.of(((1, 2.0), (3, -1.0), (1, 0.5)), CPU).apply(logits)
    ban(logits, token_array([1]), torch.tensor([1, 2]))

    assert logits[0].tolist() == pytest.approx([0.0, 2.5, 0.0, -1.0])
    assert logits[1].tolist() == pytest.approx([0.0, -np.inf, -np.inf, -1.0])


def test_everything_is_kept_on_the_logits_device_in_single_precision():
    # The meta device computes nothing and is not the default one: what forgets it is seen.
    meta = torch.device("meta")
    bias = TokenBias.of([(1, 0.5)], meta)
    counts = Counts.of(token_array([1]), token_array([2]), VOCAB_SIZE, meta)

    assert {bias.token_ids.device, bias.values.device} == {meta}
    assert (bias.token_ids.dtype, bias.values.dtype) == (torch.int64, torch.float32)
    assert {counts.output.device, counts.seen.device} == {meta}
    assert (counts.output.dtype, counts.seen.dtype) == (torch.float32, torch.bool)

    logits = torch.empty(2, VOCAB_SIZE, device=meta)
    tree = TokenTree.chain([3])
    penalise(logits, [PenalisedRows(0, counts, SamplingParams(presence_penalty=1.0), tree)])
    bias.apply(logits)
    ban(logits, token_array([0]), torch.tensor([1], device=meta))
    cutoffs = sorted_cutoffs(logits, RowLaws.of([SamplingParams(top_p=0.9)] * 2, meta))
    assert (cutoffs.device, cutoffs.shape) == (meta, (2,))


# Sampling numbers at the edges of their type: float32 logits keep a law, whatever they are.


MANY = 200
# The least double, below and at the least float32, the least normal ones of both.
TINY = (5e-324, 2.3e-308, 1e-46, 1e-45, 1e-38, 1.2e-38)
HUGE = (1e30, 3.5e38, 1e300)
TRUNCATIONS = tuple(
    {"top_p": top_p, "min_p": min_p, "top_k": top_k}
    for top_p, min_p, top_k in itertools.product(
        (5e-324, 1.0 - 2**-53, 1.0), (0.0, 5e-324, 0.5, 1.0), (0, 1, 2**31 - 1)
    )
)


@pytest.mark.parametrize("temperature", TINY)
def test_a_temperature_that_is_nothing_is_greedy_under_every_truncation(temperature: float):
    logits = random_logits(1, len(TRUNCATIONS), MANY)
    params = [SamplingParams(temperature=temperature, seed=3, **more) for more in TRUNCATIONS]
    found = drawn(logits, params, range(len(params)))
    assert (found >= 0).all()
    assert found.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", HUGE)
def test_a_temperature_beyond_all_leaves_every_token_and_no_banned_one(temperature: float):
    logits = torch.tensor([[1.0, -torch.inf, 3.0]])
    law = RowLaws.of([SamplingParams(temperature=temperature)], CPU)
    scaled = scale(logits, logits.amax(1), law.temperature)
    assert scaled.exp().tolist() == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize("temperature", [*TINY, 1.0, *HUGE])
def test_both_ways_to_find_a_cutoff_agree_at_the_edges(temperature: float):
    params = [SamplingParams(temperature=temperature, **more) for more in TRUNCATIONS]
    laws = RowLaws.of(params, CPU)
    logits = torch.from_numpy(random_logits(2, len(params), MANY))
    scaled = scale(logits, logits.amax(1), laws.temperature)
    cutoffs = sorted_cutoffs(scaled, laws), survivors(scaled, laws, 5).cutoffs
    kept = [scaled >= each.unsqueeze(1) for each in cutoffs]
    assert torch.equal(*kept)
    assert kept[0].any(dim=1).all()


@pytest.mark.parametrize("temperature", TINY)
def test_near_ties_of_a_tiny_temperature_are_told_apart(temperature: float):
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert winner_among(logits, np.array([0, 1, 2]), temperature, (1, 2, 0)) == 1


@pytest.mark.parametrize("penalty", [*TINY, 1e-20, 10.0, *HUGE])
@pytest.mark.parametrize("shift", [-1e300, -2.0, 2.0, 1e300])
def test_penalties_leave_finite_logits_that_are_in_order(penalty: float, shift: float):
    logits = torch.tensor([[30.0, 31.0, -2.0, 0.0, -torch.inf, 5.0]])
    counts = Counts.of(token_array([0, 1, 2, 3, 4]), token_array([2, 2, 4]), 6, CPU)
    for params in (
        SamplingParams(repetition_penalty=penalty),
        SamplingParams(repetition_penalty=penalty, frequency_penalty=shift),
        SamplingParams(repetition_penalty=penalty, presence_penalty=shift),
    ):
        row = logits.clone()
        penalise(row, [PenalisedRows(0, counts, params, EMPTY_TREE)])
        values = row[0]
        assert not values.isnan().any()
        assert values[4] == -torch.inf  # what the model itself rules out
        assert values[[0, 1, 2, 3, 5]].isfinite().all()
        assert values[1] > values[0]


@pytest.mark.parametrize("value", [-1e300, -5e-324, 5e-324, 1e300])
def test_a_bias_leaves_finite_logits(value: float):
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    TokenBias.of([(0, value), (2, value)], CPU).apply(logits)
    assert logits[0].tolist()[2] == -np.inf
    assert logits[0, :2].isfinite().all()
