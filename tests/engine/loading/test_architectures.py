"""Every served architecture says what transformers says; the others are refused by name."""

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cluster.core import TokenTree
from cluster.engine.engine import Work
from cluster.engine.loading.model_config import SINCE
from tests.support.architectures import BY_TEXT, REFUSED, SERVED
from tests.support.choices import by_day
from tests.support.engine.driver import (
    TREE,
    Factory,
    GreedyDecoder,
    expected_rows,
    generate_all,
    load_engine,
    load_oracle,
    prompt,
    rows,
    run,
)
from tests.support.errors import config_error

# One of each kind of layer; `test_taps.py` asks all for their logits every day.
KINDS = {
    "llama",
    "mixtral",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "phimoe",
    "gpt2",
    "qwen3.5",
    "lfm2",
    "deepseek-v3",
    "qwen3-vl",
}


def _known() -> list[str]:
    """Those that the installed transformers is old enough to lack left out."""
    kinds = {name: kind for name, (kind, _) in {**SERVED, **BY_TEXT}.items()}
    known = [each for each, kind in kinds.items() if kind in CONFIG_MAPPING or kind not in SINCE]
    return by_day([each for each in known if each in KINDS], known)


@pytest.mark.parametrize("architecture", _known())
def test_greedy_text_equals_transformers_generate(architecture: str, checkpoint_factory: Factory):
    """Two prompts at once, one longer than the window and than a chunk, plain and with trees."""
    folder = checkpoint_factory(architecture)
    prompts = {"short": prompt(5, seed=1), "long": prompt(43, seed=2)}
    texts = generate_all(load_oracle(folder), prompts, 24)
    engine = load_engine(folder, max_batch_tokens=32)
    assert GreedyDecoder(engine, prompts, 24).run() == texts
    drafted = GreedyDecoder(engine, prompts, 24, np.random.default_rng(3), texts)
    assert drafted.run() == texts
    assert drafted.num_accepted > 0
    assert engine.pages_in_use == 0


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_tree_may_reach_beyond_the_context_limit(architecture: str, checkpoint_factory: Factory):
    """Learned position tables end there; rows up to the limit are right all the same."""
    folder = checkpoint_factory(architecture, max_position_embeddings=32, n_positions=32)
    work = Work("a", 0, prompt(30), TokenTree.chain([5, 6, 7, 8]))
    found = rows(run(load_engine(folder), work))
    expected = expected_rows(load_oracle(folder), prompt(30), TokenTree.chain([5, 6]))
    torch.testing.assert_close(found[:3], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(architecture: str, checkpoint_factory: Factory):
    folder = checkpoint_factory(architecture)
    with config_error("cannot be served", "model") as caught:
        load_engine(folder)
    assert architecture.split("-")[0] in caught.value.message.lower()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rows_stay_close_to_float32(dtype: str, checkpoint_factory: Factory):
    folder = checkpoint_factory("llama", init_std=0.05)
    found = rows(run(load_engine(folder, dtype=dtype), Work("a", 0, prompt(20), TREE)))
    expected = expected_rows(load_oracle(folder), prompt(20), TREE)
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 0.05
