"""On a CPU the KV cache takes memory page by page, and by default no more than a laptop has."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from cluster.config.schema import EngineConfig
from cluster.engine.memory import pool_sizes
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.types import LayerSpec

GIB = 1024**3
LAYER = LayerSpec(4, 64, torch.bfloat16, torch.device("cpu"))
LAYERS = [LAYER] * 8
PAGE_SIZE = 16


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize()


def test_pages_that_nobody_has_used_take_no_memory() -> None:
    num_pages = 4096
    num_bytes = len(LAYERS) * num_pages * PAGE_SIZE * 2 * 4 * 64 * 2
    before = resident_bytes()
    cache = KVCache(LAYERS, [num_pages], PAGE_SIZE)
    assert num_bytes >= GIB // 2
    assert resident_bytes() - before < num_bytes // 8
    for layer in cache.layers:
        layer[:PAGE_SIZE] = 1.0
    # A page of 2 MiB in each layer, where the system has such.
    assert resident_bytes() - before < num_bytes // 8


def test_a_page_that_nobody_has_written_to_is_zeros() -> None:
    cache = KVCache(LAYERS, [64], PAGE_SIZE)
    assert not any(layer.count_nonzero() for layer in cache.layers)
    cache.layers[3][5] = 2.0
    assert int(cache.layers[3].count_nonzero()) == 2 * 4 * 64
    assert not cache.layers[2].count_nonzero()


@pytest.mark.parametrize(
    ("free", "fraction", "expected"),
    [
        (64 * GIB, None, 2 * GIB),
        (6 * GIB, None, GIB * 3 // 2),
        (64 * GIB, 0.1, int(6.4 * GIB)),
        (64 * GIB, 0.9, 16 * GIB),
    ],
)
def test_the_default_on_a_cpu_is_a_size_that_a_laptop_has(
    free: int, fraction: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_sizes, "free_bytes", lambda device: free)
    config = EngineConfig(memory_fraction=fraction)
    assert pool_sizes._free_bytes(LAYER.device, config) == expected
