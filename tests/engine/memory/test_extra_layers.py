"""A draft head's layer shares the pages of the model's, and costs memory like the others.

That its rows are where the page table says is shown with the heads themselves (tests/draft).
"""

from __future__ import annotations

from pathlib import Path

import torch

from cluster.engine.engine import Engine
from cluster.engine.memory.kv_cache import layer_groups
from cluster.engine.types import LayerSpec
from tests.support.engine.driver import load_engine

CPU = torch.device("cpu")
# Other heads than any layer of the model has.
HEAD = (LayerSpec(1, 6, torch.float32, CPU), LayerSpec(3, 2, torch.float32, CPU))
PAGE_SIZE = 4


def test_its_pages_cost_memory_like_the_others(llama_folder: Path) -> None:
    plain = load_engine(llama_folder)
    engine = Engine(plain.config, plain.model, extra_layers=HEAD)
    own, both = (
        layer_groups(layers, PAGE_SIZE)[0].bytes_per_page()
        for layers in (engine.model.layers, engine.layers)
    )
    assert both - own == PAGE_SIZE * 2 * 4 * (1 * 6 + 3 * 2)
    assert sum(kv.nbytes for kv in engine.cache.layers) == both * (engine.pages_total + 1)
    assert [tuple(kv.shape[2:]) for kv in engine.cache.layers[-2:]] == [(1, 6), (3, 2)]
