"""The memory of the cache is divided so that both kinds of layers serve the same texts, and what a
GPU keeps free beside it is what the widest step takes."""

from dataclasses import replace

import pytest
import torch

from cluster.config.schema import EngineConfig
from cluster.engine.memory import pool_sizes
from cluster.engine.memory.kv_cache import layer_groups
from cluster.engine.memory.pool_sizes import Reserve, derive_num_pages, measured, reserve, run
from cluster.engine.types import LayerSpec
from cluster.spec.draw import drawing_bytes
from tests.support.architectures import SERVED
from tests.support.choices import by_day
from tests.support.engine.driver import Factory, load_engine
from tests.support.errors import config_error

GIB = 1024**3
PAGE_SIZE, WINDOW = 16, 128
FULL = LayerSpec(2, 8, torch.float32, torch.device("cpu"))
WINDOWED = replace(FULL, window=WINDOW)
# Five layers with a window to one without, as in Gemma 3.
MIXED = [WINDOWED, WINDOWED, FULL, WINDOWED, WINDOWED, WINDOWED]
KINDS = {"mixed": MIXED, "full": [FULL] * 6, "windowed": [WINDOWED] * 6}


def config(**settings: int) -> EngineConfig:
    defaults = {"page_size": PAGE_SIZE, "max_batch_tokens": 32, "max_running_sequences": 4}
    return EngineConfig(**{**defaults, **settings})


def in_layers(num_pages: tuple[int, ...], layers: list[LayerSpec]) -> int:
    """Pages of single layers, of which all here are equally large."""
    groups = layer_groups(layers, PAGE_SIZE)
    return sum(pages * len(group.layers) for pages, group in zip(num_pages, groups, strict=True))


@pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_pages", [1, 9, 64, 333, 1000, 7000])
def test_the_division_takes_the_memory_of_as_many_pages_in_every_layer(
    layers: list[LayerSpec], num_pages: int
):
    found = derive_num_pages(config(num_pages=num_pages), layers, 4096, 0)
    assert in_layers(found, layers) <= num_pages * len(layers)
    # What is left is less than a page of the full layers.
    more = (found[0] + 1, *found[1:])
    assert in_layers(more, layers) > num_pages * len(layers)


@pytest.mark.parametrize("num_pages", [40, 60, 100, 200])
def test_the_longest_text_is_never_short_of_a_windows_pages(num_pages: int):
    """However many texts may run besides, as long as it fits by itself."""
    for num_running in (1, 64, 1000):
        settings = config(num_pages=num_pages, max_running_sequences=num_running)
        full, windowed = derive_num_pages(settings, MIXED, 2048, 0)
        assert full >= 2048 // PAGE_SIZE
        assert windowed >= (WINDOW + 2 * 32) // PAGE_SIZE + 3


def test_memory_that_is_too_small_for_the_longest_text_serves_as_long_a_one_as_can_be():
    full, windowed = derive_num_pages(config(num_pages=20), MIXED, 2048, 0)
    assert windowed == (WINDOW + 2 * 32) // PAGE_SIZE + 3
    assert full == 20 * 6 - 5 * windowed
    # So little that no page has left the window when it is full: all layers hold the same.
    assert derive_num_pages(config(num_pages=9), MIXED, 2048, 0) == (9, 9)


def test_layers_on_several_devices_fit_each_of_them():
    """The one with most of the full layers is the first to be full."""
    other = torch.device("meta")
    layers = [*MIXED, *(replace(FULL, device=other),) * 2, replace(WINDOWED, device=other)]
    full, windowed = derive_num_pages(config(num_pages=60), layers, 2048, 0)
    assert full + 5 * windowed <= 60 * 6
    assert 2 * full + windowed <= 60 * 3
    assert full > windowed


def test_pages_on_a_cpu_are_what_the_running_texts_can_use(
    monkeypatch: pytest.MonkeyPatch,
):
    wanted = derive_num_pages(config(), MIXED, 2048, 0)
    assert 0 <= wanted[0] - 4 * 2048 // PAGE_SIZE < 6
    assert wanted[1] < wanted[0] // 4
    page_bytes = 6 * PAGE_SIZE * 2 * 2 * 8 * 4
    monkeypatch.setattr(pool_sizes, "free_bytes", lambda device: 4 * 50 * page_bytes)
    assert derive_num_pages(config(), MIXED, 2048, 0) == derive_num_pages(
        config(num_pages=50), MIXED, 2048, 0
    )
    monkeypatch.setattr(pool_sizes, "free_bytes", lambda device: 3 * page_bytes)
    with config_error("memory_fraction"):
        derive_num_pages(config(), MIXED, 2048, 0)


VOCAB_SIZE = 128_256
WIDE = EngineConfig(max_batch_tokens=2048)


@pytest.mark.parametrize(
    "architecture",
    # Keys and values, convolutions, states, and what layers share.
    by_day(["llama", "lfm2", "qwen3.5", "gemma4"], SERVED),
)
def test_a_forward_without_a_cache_runs_for_every_architecture(
    architecture: str, checkpoint_factory: Factory
):
    """It is what a GPU's memory is measured by, and nothing on a CPU."""
    engine = load_engine(checkpoint_factory(architecture))
    run(engine.model, 40, 3)
    assert measured(engine.config, engine.model, 3) == engine.reserve == Reserve()


def reserved(of_row: int, *, in_graphs: bool) -> Reserve:
    """Where each row of a forward takes so many bytes."""
    forward = lambda rows, _: rows * of_row  # noqa: E731
    return reserve(WIDE, (), VOCAB_SIZE, 64, forward, on_one_gpu=in_graphs)


def test_a_step_takes_the_more_of_its_forward_and_its_draws():
    drawing, forward = drawing_bytes(64, VOCAB_SIZE), 2048 * 10**6
    assert drawing < reserved(1, in_graphs=False).steps <= 1.1 * drawing
    assert forward < reserved(10**6, in_graphs=False).steps <= 1.1 * forward


def test_graphs_take_what_the_widest_one_does():
    wide, logits = 512 * 10**6, 256 * VOCAB_SIZE * 4
    assert wide + logits < reserved(10**6, in_graphs=True).graphs <= 1.1 * (wide + logits)
    assert reserved(10**6, in_graphs=False).graphs == 0


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
):
    monkeypatch.setattr(pool_sizes, "free_bytes", lambda device: free)
    config = EngineConfig(memory_fraction=fraction)
    assert pool_sizes._free_bytes(FULL.device, config) == expected
