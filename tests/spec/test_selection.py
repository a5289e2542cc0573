"""Finding a law's border: by a sort, or among the greatest; the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cluster.core import SamplingParams
from cluster.spec.draw import drawing_bytes
from cluster.spec.sampling import (
    WORKSPACE_BYTES,
    RowLaws,
    among_greatest,
    scale,
    sorted_cutoffs,
    survivors,
)
from tests.support.choices import by_night

CPU = torch.device("cpu")

LAWS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-3, 0.3, 0.7, 1.0, 1.9, 50.0]),
    top_p=st.sampled_from([1.0, 1 - 1e-7, 0.95, 0.75, 0.5, 0.25, 0.05, 1e-6]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 64, 100, 299, 300, 10_000]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
)
# What ties, and how masses are spread: equal halves put a border exactly where two sums meet.
ROWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
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
    st.lists(st.tuples(LAWS, st.sampled_from(list(ROWS))), min_size=1, max_size=5),
    st.integers(0, 10_000),
    st.sampled_from([1, 5, 64, 299]),
    st.sampled_from([1, 2, 65, 300]),
)
def test_every_way_to_find_the_survivors_finds_the_same(
    rows: list[tuple[SamplingParams, str]], seed: int, num_candidates: int, vocab_size: int
) -> None:
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
def test_a_selection_takes_no_more_memory_than_a_draw_is_said_to(top_p: float) -> None:
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
