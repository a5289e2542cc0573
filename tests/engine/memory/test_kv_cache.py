"""The cache's memory: taken page by page on a CPU, shared with a draft head's layers, and moved in
when somebody reads."""

import resource
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.engine import Engine
from cluster.engine.memory.kv_cache import KVCache, layer_groups
from cluster.engine.types import LayerSpec
from tests.support.engine.driver import PAGE_SIZE, load_engine

CPU = torch.device("cpu")
NUM_SLOTS = 12
# Two groups, and two tensors in one of them.
LAYERS = (
    LayerSpec(1, 1, torch.float32, CPU),
    LayerSpec(2, 1, torch.float32, CPU),
    LayerSpec(1, 1, torch.float32, CPU, window=4),
)
SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=4, unique=True)
# Other heads than any layer of a model has.
HEAD = (LayerSpec(1, 6, torch.float32, CPU), LayerSpec(3, 2, torch.float32, CPU))
ALIKE = [LayerSpec(4, 64, torch.bfloat16, CPU)] * 8


@given(st.lists(st.tuples(st.integers(0, 1), SLOTS, SLOTS), max_size=6))
def test_moves_that_wait_are_those_made_one_by_one(
    moves: list[tuple[int, list[int], list[int]]],
):
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


def test_pages_of_a_draft_heads_layers_cost_memory_like_the_others(llama_folder: Path):
    """That its rows are where the page table says is shown with the heads themselves."""
    plain = load_engine(llama_folder)
    engine = Engine(plain.config, plain.model, extra_layers=HEAD)
    own, both = (
        layer_groups(layers, PAGE_SIZE)[0].bytes_per_page()
        for layers in (engine.model.layers, engine.layers)
    )
    assert both - own == PAGE_SIZE * 2 * 4 * (1 * 6 + 3 * 2)
    assert sum(kv.nbytes for kv in engine.cache.layers) == both * (engine.pages_total + 1)
    assert [tuple(kv.shape[2:]) for kv in engine.cache.layers[-2:]] == [(1, 6), (3, 2)]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize()


def test_pages_that_nobody_has_used_take_no_memory():
    num_pages = 4096
    num_bytes = len(ALIKE) * num_pages * 16 * 2 * 4 * 64 * 2
    before = resident_bytes()
    cache = KVCache(ALIKE, [num_pages], 16)
    assert num_bytes >= 2**29
    assert resident_bytes() - before < num_bytes // 8
    for layer in cache.layers:
        layer[:16] = 1.0
    # A page of 2 MiB in each layer, where the system has such.
    assert resident_bytes() - before < num_bytes // 8


def test_a_page_that_nobody_has_written_to_is_zeros():
    cache = KVCache(ALIKE, [64], 16)
    assert not any(layer.count_nonzero() for layer in cache.layers)
    cache.layers[3][5] = 2.0
    assert int(cache.layers[3].count_nonzero()) == 2 * 4 * 64
    assert not cache.layers[2].count_nonzero()
