"""Moves of the cache wait until somebody reads, and are then what they would have been at once."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.types import LayerSpec

CPU = torch.device("cpu")
NUM_SLOTS = 12
# Two groups, and two tensors in one of them.
LAYERS = (
    LayerSpec(1, 1, torch.float32, CPU),
    LayerSpec(2, 1, torch.float32, CPU),
    LayerSpec(1, 1, torch.float32, CPU, window=4),
)
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=4, unique=True)


@given(st.lists(st.tuples(st.integers(0, 1), SLOTS, SLOTS), max_size=6))
def test_moves_that_wait_are_those_made_one_by_one(
    moves: list[tuple[int, list[int], list[int]]],
) -> None:
    cache = KVCache(LAYERS, [NUM_SLOTS // 4 - 1] * 2, 4)
    expected = [np.arange(NUM_SLOTS), np.arange(NUM_SLOTS)]
    for layer in cache.layers:
        layer[:] = torch.arange(NUM_SLOTS).view(-1, 1, 1, 1).float()
    for group, sources, destinations in moves:
        size = min(len(sources), len(destinations))
        source, destination = sources[:size], destinations[:size]
        cache.move(group, source, destination)
        expected[group][destination] = expected[group][source]
    cache.settle()
    for layer, group in zip(cache.layers, cache.group_of, strict=True):
        assert torch.equal(layer[:, 1, 0, 0], torch.from_numpy(expected[group]).float())
