"""The memory of the cache is divided so that both kinds of layers serve the same texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cluster.config.schema import EngineConfig
from cluster.engine.memory import pool_sizes
from cluster.engine.memory.kv_cache import layer_groups
from cluster.engine.memory.pool_sizes import derive_num_pages
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError

PAGE_SIZE, WINDOW = 16, 128
FULL = LayerSpec(2, 8, torch.float32, torch.device("cpu"))
WINDOWED = replace(FULL, window=WINDOW)
# Five layers with a window to one without, as in Gemma 3.
MIXED = [WINDOWED, WINDOWED, FULL, WINDOWED, WINDOWED, WINDOWED]
KINDS = {"mixed": MIXED, "full": [FULL] * 6, "windowed": [WINDOWED] * 6}


def config(**settings: int) -> EngineConfig:
    defaults = {"page_size": PAGE_SIZE, "max_batch_tokens": 32, "max_running_sequences": 4}
    return EngineConfig(**{**defaults, **settings})  # type: ignore[arg-type]


def in_layers(num_pages: tuple[int, ...], layers: list[LayerSpec]) -> int:
    """Pages of single layers, of which all here are equally large."""
    groups = layer_groups(layers, PAGE_SIZE)
    return sum(pages * len(group.layers) for pages, group in zip(num_pages, groups, strict=True))


@pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_pages", [1, 9, 64, 333, 1000, 7000])
def test_the_division_takes_the_memory_of_as_many_pages_in_every_layer(
    layers: list[LayerSpec], num_pages: int
) -> None:
    found = derive_num_pages(config(num_pages=num_pages), layers, 4096, 0)
    assert in_layers(found, layers) <= num_pages * len(layers)
    # What is left is less than a page of the full layers.
    more = (found[0] + 1, *found[1:])
    assert in_layers(more, layers) > num_pages * len(layers)


@pytest.mark.parametrize("num_pages", [40, 60, 100, 200])
def test_the_longest_text_is_never_short_of_a_windows_pages(num_pages: int) -> None:
    """However many texts may run besides, as long as it fits by itself."""
    for num_running in (1, 64, 1000):
        settings = config(num_pages=num_pages, max_running_sequences=num_running)
        full, windowed = derive_num_pages(settings, MIXED, 2048, 0)
        assert full >= 2048 // PAGE_SIZE
        assert windowed >= (WINDOW + 2 * 32) // PAGE_SIZE + 3


def test_memory_that_is_too_small_for_the_longest_text_serves_as_long_a_one_as_can_be() -> None:
    full, windowed = derive_num_pages(config(num_pages=20), MIXED, 2048, 0)
    assert windowed == (WINDOW + 2 * 32) // PAGE_SIZE + 3
    assert full == 20 * 6 - 5 * windowed
    # So little that no page has left the window when it is full: all layers hold the same.
    assert derive_num_pages(config(num_pages=9), MIXED, 2048, 0) == (9, 9)


def test_layers_on_several_devices_fit_each_of_them() -> None:
    """The one with most of the full layers is the first to be full."""
    other = torch.device("meta")
    layers = [*MIXED, *(replace(FULL, device=other),) * 2, replace(WINDOWED, device=other)]
    full, windowed = derive_num_pages(config(num_pages=60), layers, 2048, 0)
    assert full + 5 * windowed <= 60 * 6
    assert 2 * full + windowed <= 60 * 3
    assert full > windowed


def test_pages_on_a_cpu_are_what_the_running_texts_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = derive_num_pages(config(), MIXED, 2048, 0)
    assert 0 <= wanted[0] - 4 * 2048 // PAGE_SIZE < 6
    assert wanted[1] < wanted[0] // 4
    page_bytes = 6 * PAGE_SIZE * 2 * 2 * 8 * 4
    monkeypatch.setattr(pool_sizes, "free_bytes", lambda device: 4 * 50 * page_bytes)
    assert derive_num_pages(config(), MIXED, 2048, 0) == derive_num_pages(
        config(num_pages=50), MIXED, 2048, 0
    )
    monkeypatch.setattr(pool_sizes, "free_bytes", lambda device: 3 * page_bytes)
    with pytest.raises(ConfigError, match="memory_fraction"):
        derive_num_pages(config(), MIXED, 2048, 0)
