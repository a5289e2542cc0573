"""Layers that read the keys and values of another take no memory, and write nothing."""

import numpy as np
import pytest
import torch

from cluster.config.schema import EngineConfig
from cluster.engine.loading.inspection import check_splittable, describe
from cluster.engine.loading.planned import planned
from tests.support.engine.driver import (
    PAGE_SIZE,
    Factory,
    GreedyDecoder,
    check_text,
    generate_all,
    load_engine,
    load_oracle,
    prompt,
)
from tests.support.errors import config_error

# Three layers, then three that read those of their kind.
SHARED_WITH = [None, None, None, 1, 1, 2]


@pytest.mark.parametrize("architecture", ["gemma4", "gemma3n"])
def test_they_are_found_and_stand_where_the_others_do(
    architecture: str, checkpoint_factory: Factory
):
    folder = checkpoint_factory(architecture)
    engine = load_engine(folder)
    assert [each.shared_with for each in engine.model.layers] == SHARED_WITH
    places = [layer.data_ptr() for layer in engine.cache.layers]
    assert len(set(places)) == 3
    assert places[3:] == [places[1], places[1], places[2]]
    # What `check` says of a token's memory is what a page of the cache takes.
    config = EngineConfig(model=str(folder), device="cpu", page_size=PAGE_SIZE)
    sizes = planned(folder, describe(folder, config), config, is_here=True)
    of_page = sum(group.bytes_per_page() for group in engine.cache.groups)
    assert sizes.kv_per_token * PAGE_SIZE == of_page


def test_a_text_survives_preemption_and_hits_of_its_prefix(checkpoint_factory: Factory):
    folder, common = checkpoint_factory("gemma4"), prompt(40, seed=5)
    prompts = {
        name: np.concatenate((common, prompt(5, seed=seed))) for seed, name in enumerate("abc")
    }
    texts = generate_all(load_oracle(folder), prompts, 24)
    # They hold one text or two of the three.
    engine = load_engine(folder, num_pages=26, max_context_len=80, max_running_sequences=3)
    decoder = GreedyDecoder(engine, prompts, 24, np.random.default_rng(1), texts)
    assert decoder.run() == texts
    assert decoder.num_misses > 0
    assert GreedyDecoder(engine, {"a": prompts["a"]}, 24).run() == {"a": texts["a"]}


def test_a_layer_that_wrote_nothing_is_not_read(checkpoint_factory: Factory):
    """The negative control: read as the keys of a layer of its own, the text is another."""
    folder = checkpoint_factory("gemma4")
    engine, oracle = load_engine(folder), load_oracle(folder)
    check_text(engine, oracle, prompt(30), 16)
    engine.cache.layers[5] = torch.zeros_like(engine.cache.layers[5])
    with pytest.raises(AssertionError):
        check_text(engine, oracle, prompt(31, seed=1), 16)


def test_ranks_take_whole_key_heads_of_every_kind_of_layer(checkpoint_factory: Factory):
    folder = checkpoint_factory("gemma4-large")
    text = describe(folder, EngineConfig(model=str(folder))).text_config
    with config_error("has 1 key-value heads, which do not divide evenly"):
        check_splittable(text, 2)
