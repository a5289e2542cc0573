"""The check at load accepts what is right but for rounding, and nothing that lacks a layer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.engine.attention import seam
from cluster.engine.engine import Engine
from cluster.engine.loading import self_check
from cluster.engine.loading.model import LoadedModel
from cluster.engine.loading.probe import probe_layers
from tests.support.engine.driver import Factory, load_engine
from tests.support.engine.native import needs_native
from tests.support.engine.tiny import tiny
from tests.support.errors import config_error

# Trained, so that one layer less changes the logits by less than a coarse format's worst noise.
TRAINED = Path("models/demo-target")
CPU = torch.device("cpu")


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_native_layer_with_anothers_weights_is_refused(dtype: str):
    engine = load_engine(TRAINED, dtype=dtype)
    self_check.check(engine, engine.model)
    other, wrong = (each.contents for each in engine.model.native._weights[2:4])
    wrong.out, wrong.down = other.out, other.down
    with config_error("logits are off by"):
        self_check.check(engine, engine.model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_skips_a_layer_is_refused(dtype: str):
    engine = load_engine(TRAINED, dtype=dtype, attention="sdpa")
    self_check.check(engine, engine.model)

    def skip(module: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        return given[0] if named.get("plan") is not None else output  # the reference has none

    engine.model.module.model.layers[3].register_forward_hook(skip, with_kwargs=True)
    with config_error("logits are off by"):
        self_check.check(engine, engine.model)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_rounding_in_a_deep_random_network_is_accepted(attention: str, checkpoint_factory: Factory):
    folder = checkpoint_factory("llama", head_dim=16, num_hidden_layers=24, init_std=0.1)
    engine = load_engine(folder, dtype="bfloat16", attention=attention)
    assert {layer.dtype for layer in engine.layers} == {torch.bfloat16}


def plain_engine(folder: Path, **settings: Any) -> Engine:
    """One whose linear layers are as loaded, as on a GPU."""
    config = tiny(folder, {"dtype": "bfloat16", "attention": "sdpa", **settings})
    module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=seam.IMPLEMENTATION
    )
    module.eval().requires_grad_(False)
    with torch.inference_mode():
        layers = probe_layers(module, CPU)
    sizes = (module.config.vocab_size, module.config.max_position_embeddings, ())
    return Engine(config, LoadedModel(module, str(folder), "plain", layers, CPU, *sizes))


@pytest.fixture
def long_folder(checkpoint_factory: Factory) -> Path:
    """Its first layer has a window that the long case crosses."""
    return checkpoint_factory("gemma3", sliding_window=100, max_position_embeddings=2048)


def test_in_coarse_formats_both_forwards_are_measured_against_float32(long_folder: Path):
    engine = plain_engine(long_folder, num_pages=512)
    before = [parameter.data_ptr() for parameter in engine.model.module.parameters()]
    found = self_check.distances(engine, engine.model, is_long=True)
    assert list(found) == ["short", "long"]
    for each in found.values():
        assert 0.25 * each.bound / 4 < each.deviation < 0.5 * each.bound < 0.1
    # The weights are where graphs know them.
    assert [each.data_ptr() for each in engine.model.module.parameters()] == before
    assert {each.dtype for each in engine.model.module.parameters()} == {torch.bfloat16}
    assert engine.pages_in_use == 0


def test_the_pages_of_the_long_case_lie_apart(long_folder: Path, monkeypatch: pytest.MonkeyPatch):
    engine = plain_engine(long_folder, num_pages=512)
    slots, release = [], engine.release

    def noting(name: str) -> None:
        slots.append(engine.slots(name, 1))  # the layer without a window
        release(name)

    monkeypatch.setattr(engine, "release", noting)
    self_check.distances(engine, engine.model, is_long=True)
    text = max(slots, key=len)
    assert len(text) == 600 + 24
    pages = np.unique(text // engine.config.page_size)
    gaps = np.flatnonzero(np.diff(pages) > 1)
    assert len(gaps) >= 2, f"the pages {pages} lie beside each other"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_only_a_long_text_shows_is_refused(dtype: str, long_folder: Path):
    engine = plain_engine(long_folder, num_pages=512)
    if dtype == "float32":
        engine = load_engine(long_folder, num_pages=512, attention="sdpa")
    backend = engine.forward._backend

    class ShortSighted:
        """Forgets what lies more than 400 tokens back."""

        name, failure = "sdpa", ""

        def plan(self, batch: Any, scratch_slot: int) -> Any:
            plan = backend.plan(batch, scratch_slot)
            attend = plan.attend
            plan.attend = lambda query, kv, window, options: attend(
                query, kv, min(window or 400, 400), options
            )
            return plan

    self_check.check(engine, engine.model)
    engine.forward._backend = ShortSighted()
    found = self_check.distances(engine, engine.model, is_long=True)
    assert found["short"].deviation <= found["short"].bound
    assert found["long"].deviation > found["long"].bound


def test_an_engine_without_room_for_a_long_text_has_the_short_case(llama_folder: Path):
    engine = plain_engine(llama_folder)
    assert list(self_check.distances(engine, engine.model, is_long=True)) == ["short"]
