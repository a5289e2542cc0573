"""The native search for a draw's winner: the draws are those of the whole noise, to the token."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.core import SamplingParams, TokenArray, TokenMask, TokenTree, token_array
from cluster.engine.cpu.kernels import Kernels
from cluster.engine.draw.batch import BatchDraws
from cluster.engine.draw.native import RankedDraw
from cluster.rpc.messages import Open
from cluster.spec.logprobs import top_tokens
from cluster.spec.noise import gumbel_row
from cluster.worker.step_rows import TargetSequence
from cluster.worker.texts import TargetText
from tests.support.choices import pairwise

pytestmark = pytest.mark.usefixtures("several_threads")

CPU = torch.device("cpu")


def evaluated(
    params: SamplingParams, logits: torch.Tensor, parents: list[int] | None = None, output: int = 0
) -> TargetSequence:
    """logits: float32[rows, vocab] of a context with `output` tokens of its own, and a tree."""
    if parents is None:
        parents = list(range(-1, len(logits) - 2))
    tree = TokenTree(token_array(range(len(parents))), token_array(parents))
    context = token_array([0] * (3 + output))
    text = TargetText("a", Open("a", 0, context, 0, 3, params, 0))
    sequence = TargetSequence(text, logits.shape[1], CPU)
    sequence.tree = tree
    sequence.logits = logits
    return sequence


def drawn(kernels: Kernels, batch: list[TargetSequence]) -> list[TokenArray]:
    """Its draws, which are those of the whole noise."""
    expected, found = BatchDraws(batch).taken(), BatchDraws(batch, kernels).taken()
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    return found


def test_many_rows_are_drawn_from_in_parts_as_each_by_itself():
    generator = torch.Generator().manual_seed(5)
    batch = [
        evaluated(
            SamplingParams(1.0, seed=seed, repetition_penalty=1.0 + seed % 2, top_k=seed % 3),
            torch.randn((rows, 400), generator=generator),
        )
        for seed, rows in enumerate((100, 156, 1, 300, 7, 8))
    ]
    expected = [BatchDraws([each]).taken()[0] for each in batch]
    found = BatchDraws(batch).taken()
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


@pytest.mark.parametrize("vocab_size", [1, 7, 50, 4096, 4100])
@pytest.mark.parametrize("spread", [0.0, 0.01, 4.0])
def test_draws_are_those_of_the_whole_noise(kernels: Kernels, vocab_size: int, spread: float):
    generator = np.random.default_rng(vocab_size)
    batch = []
    for temperature in (0.0, 1e-3, 0.8, 1.0, 2.0, 1e-44, 1e-50):
        logits = torch.from_numpy(generator.standard_normal((9, vocab_size)).astype(np.float32))
        logits *= spread
        logits[3, 0] = torch.nan
        logits[4, :] = -torch.inf
        logits[5, ::2] = -torch.inf
        logits[6, -1] = torch.inf
        params = SamplingParams(
            temperature, seed=int(generator.integers(2**63)), stream=int(generator.integers(4))
        )
        parents = [-1, 0, 0, -1, 3, 4, 2, 0]
        batch.append(evaluated(params, logits, parents, int(generator.integers(5000))))
    assert all(each[[3, 4, 6]].tolist() == [-1, -1, -1] for each in drawn(kernels, batch))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_done_to_the_logits_before_the_draw_is_done(kernels: Kernels, temperature: float):
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    untouched = logits.clone()
    plain = SamplingParams(temperature, seed=5)
    adjusted = [
        SamplingParams(temperature, seed=5, logit_bias=((7, 30.0),)),
        SamplingParams(temperature, seed=5, repetition_penalty=1.5, presence_penalty=2.0),
        SamplingParams(temperature, seed=5, min_tokens=9, stop_token_ids=(3, 4)),
    ]
    found = drawn(kernels, [evaluated(params, logits) for params in (*adjusted, plain)])
    assert found[0].tolist() == [7] * 5
    assert torch.equal(logits, untouched)


class Fixed:
    """A hook that allows the same tokens at the same rows in every step."""

    def __init__(self, allowed: npt.NDArray[np.bool_]) -> None:
        """allowed: bool[rows, vocab]."""
        # The bits beyond the vocabulary are no tokens, whatever they say.
        bits = np.ones((len(allowed), -(-allowed.shape[1] // 32) * 32), dtype=np.bool_)
        bits[:, : allowed.shape[1]] = allowed
        self._masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)

    def extend(self, base_len: int, token_ids: TokenArray) -> None: ...

    def prepare(self, tree: TokenTree) -> range:
        return range(len(tree))

    def masks(self) -> TokenMask:
        return self._masks


@pairwise(vocab_size=[7, 64, 4100], spread=[0.0, 4.0], temperature=[0.0, 0.8, 1e-50])
def test_masked_draws_are_those_of_the_masked_law(
    kernels: Kernels, vocab_size: int, spread: float, temperature: float
):
    generator = np.random.default_rng(vocab_size)
    allowed = generator.random((6, vocab_size)) < 0.3
    allowed[:, 0] = True
    allowed[1] = np.arange(vocab_size) == vocab_size - 1
    allowed[2] = True
    allowed[3] = False
    logits = torch.from_numpy(generator.standard_normal((6, vocab_size)).astype(np.float32))
    logits *= spread
    logits[0, ~allowed[0]] = 90.0  # what is forbidden would win
    logits[4, 0] = torch.nan
    params = SamplingParams(temperature, seed=5)
    masked = evaluated(params, logits)
    masked.hook = Fixed(allowed)
    untouched = logits.clone()
    batch = [masked, evaluated(params, logits), evaluated(replace(params, seed=6), logits)]
    found = drawn(kernels, batch)[0].tolist()
    assert allowed[0, found[0]]
    assert found[1] == vocab_size - 1
    assert found[3] == found[4] == -1
    assert torch.equal(logits.nan_to_num(), untouched.nan_to_num())


def test_laws_that_truncate_are_drawn_as_before(kernels: Kernels):
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    laws = [SamplingParams(0.8, top_p=0.5, seed=1), SamplingParams(0.8, seed=2)]
    drawn(kernels, [evaluated(params, logits) for params in laws])
    # Nothing is truncated where the law is greedy.
    drawn(kernels, [evaluated(SamplingParams(0.0, top_p=0.5), logits)])


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(400, 8), (2, 300)])
def test_near_ties_are_decided_by_the_exact_noise(kernels: Kernels, num_rows: int, vocab_size: int):
    """Also where more come into question than are kept."""
    exact = np.stack([gumbel_row(3, row, 0, vocab_size) for row in range(num_rows)])
    # Logits that undo the noise but for a rounding error: everybody may win.
    entry = evaluated(SamplingParams(1.0, seed=3), torch.from_numpy(-exact))
    other = evaluated(SamplingParams(1.0, seed=4), torch.randn(3, vocab_size))
    drawn(kernels, [other, entry, other])


def test_its_noise_is_far_more_exact_than_the_margin_asks(kernels: Kernels):
    generator = np.random.default_rng(12)
    num_rows, vocab_size = 400, kernels.max_ranked
    seeds = generator.integers(0, 2**64, num_rows, dtype=np.uint64).tolist()
    positions = generator.integers(0, 5000, num_rows).tolist()
    streams = generator.integers(0, 4, num_rows).tolist()
    keys = [*zip(seeds, positions, streams, strict=True)]
    draws = [RankedDraw(*key, 0, 1.0, 1.0, 0.0, None) for key in keys]
    token_ids, found = kernels.rank(torch.zeros(num_rows, vocab_size), vocab_size, draws)
    exact = np.stack([gumbel_row(*key, vocab_size) for key in keys])
    assert float(np.abs(found - np.take_along_axis(exact, token_ids, 1)).max()) < 1e-5


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "num_top"), [(3, 1000, 8), (1, 77, 256), (2, 5, 9)]
)
def test_the_most_probable_tokens_are_those_of_the_whole_law(
    kernels: Kernels, num_rows: int, vocab_size: int, num_top: int
):
    torch.manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size) * 4
    logits[:, 3] = logits[:, 1]  # of equal ones the lower id comes first
    logits[0, 4] = -torch.inf
    found, wanted = kernels.top(logits, num_top), top_tokens(logits, num_top)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.token_ids.dtype == wanted.token_ids.dtype
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5, rtol=1e-6)
    assert found.logprobs.dtype == wanted.logprobs.dtype
