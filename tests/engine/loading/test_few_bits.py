"""Weights in few bits: which a configuration gives a model, what it is called then, and what it
computes."""

import importlib.util
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from cluster.config.parse import parse
from cluster.config.schema import Config, EngineConfig
from cluster.engine.cpu import kernels as native
from cluster.engine.cpu.narrow import check_few_bits
from cluster.engine.cpu.products import products_here
from cluster.engine.engine import Engine
from cluster.engine.loading import model
from cluster.engine.loading.inspection import check_loadable
from cluster.engine.loading.model import load_model
from cluster.engine.state import engine_state
from cluster.models.fingerprint import model_hash
from tests.support.choices import by_day
from tests.support.engine.altered import altered
from tests.support.engine.driver import Factory, load_engine
from tests.support.engine.few_bits import check_texts, widened
from tests.support.engine.native import needs_native
from tests.support.errors import config_error
from tests.support.models.gguf_files import converted

FEW = [("llama", "int8"), ("llama", "int4"), ("llama", "Q4_1")]
FEW += [("mixtral", "int8"), ("qwen2-moe", "int4")]
MORE = [("llama", "Q4_0"), ("llama", "Q8_0"), ("qwen2-moe", "Q4_1")]


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Factory) -> Path:
    """Its layers have 64 or 96 inputs."""
    return checkpoint_factory("llama", hidden_size=64, head_dim=16, dtype=torch.bfloat16)


def load(folder: Path, **settings: Any) -> Engine:
    return load_engine(folder, **{"dtype": "auto", **settings})


@needs_native
@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, ""),
        ({"weights": "bf16"}, ""),
        ({"weights": "int8"}, "int8g32|output=int8g32"),
        ({"weights": "int8", "output_weights": "bf16"}, "int8g32|output=bf16"),
        ({"weights": "int4"}, "int4g32|output=int4g32"),
        ({"weights": "int4", "output_weights": "bf16"}, "int4g32|output=bf16"),
    ],
    ids=str,
)
def test_a_model_has_the_weights_that_are_asked_for_and_is_named_by_them(
    settings: dict[str, Any], weights: str, folder: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        engine = load(folder, **settings)
    assert engine.model.weights == weights
    suffix = f"|weights={weights}" if weights else ""
    assert engine.model_hash == model_hash(folder) + suffix
    assert f"weights={weights or 'torch.bfloat16'}" in caplog.text
    products = engine_state(engine).products
    assert products in (products_here() if weights else ("",))
    assert "widened" not in caplog.text


@needs_native
def test_a_file_keeps_its_blocks_unless_other_weights_are_asked_for(folder: Path, tmp_path: Path):
    blocks = converted(folder, tmp_path / "blocks", kind=GGMLQuantizationType.Q4_1)
    for settings, weights in (
        ({}, "int4g32|output=int4g32"),
        ({"output_weights": "bf16"}, "int4g32|output=bf16"),
        ({"weights": "bf16"}, ""),
        ({"weights": "int8"}, "int8g32|output=int8g32"),
        ({"dtype": "float32"}, ""),
    ):
        assert load(blocks, **settings).model.weights == weights, settings


@needs_native
def test_what_rounding_alone_changes_is_no_wrong_product(folder: Path, tmp_path: Path):
    def roughen(state: dict[str, torch.Tensor]) -> None:
        for name, weight in state.items():
            state[name] = weight.float()
            if name.endswith(("_proj.weight", "lm_head.weight")):
                state[name][:, 0] = 30.0  # of which all other weights are less than a step

    rough = altered(folder, tmp_path / "rough", change=roughen)
    assert load(rough, weights="int8").model.weights == "int8g32|output=int8g32"
    assert load(rough, weights="int4").model.weights == "int4g32|output=int4g32"


@needs_native
@pytest.mark.parametrize(("architecture", "kind"), by_day(FEW, [*FEW, *MORE]))
def test_greedy_text_is_that_of_transformers_with_the_weights_that_they_stand_for(
    architecture: str, kind: str, checkpoint_factory: Factory, tmp_path: Path
):
    """Rows go where transformers sends them, by equal shares: 2 of 100 rows stand so near between
    two experts that the rounding of keys to bfloat16 sends them to another one, and then these
    random networks say something else.  Routers themselves are compared in float32, in
    test_architectures.py."""
    folder = checkpoint_factory(architecture, hidden_size=64, head_dim=16, dtype=torch.bfloat16)
    settings = {"weights": kind} if kind.startswith("int") else {}
    if not settings:
        folder = converted(folder, tmp_path / "blocks", kind=GGMLQuantizationType[kind])
    engine = load(folder, prefix_cache=False, **settings)
    assert engine.model.weights
    check_texts(engine, widened(folder, settings))


@needs_native
def test_what_few_bits_cannot_hold_stays_wide_with_one_warning(
    folder: Path,
    checkpoint_factory: Factory,
    caplog: pytest.LogCaptureFixture,
):
    biased = checkpoint_factory("gpt-oss", dtype=torch.bfloat16)
    for checkpoint, settings, reason in (
        (biased, {}, "plain linear layers"),
        (folder, {"dtype": "float32"}, "plain linear layers, in bfloat16"),
        (folder, {"attention": "sdpa"}, "plain linear layers"),
    ):
        engine = load(checkpoint, weights="int4", **settings)
        (told,) = caplog.messages
        assert "weights int4 are widened to bfloat16" in told
        assert reason in told
        assert engine.model_hash == model_hash(checkpoint)
        caplog.clear()


def test_without_our_kernels_the_log_check_and_health_say_one_thing(
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(native, "load", lambda: None)
    model = checkpoint_factory("llama", dtype=torch.bfloat16)
    config = EngineConfig(model=str(model), device="cpu", weights="int4", num_pages=64)
    engine = Engine.load(config)
    told = (
        "weights int4 are widened to bfloat16: our kernels (which need a C++ compiler) take models "
        "of plain linear layers, in bfloat16"
    )
    assert told in caplog.messages
    assert engine_state(engine).fallbacks[0] == told
    assert check_loadable(model, config, is_here=True).weights == told
    assert check_loadable(model, config, is_here=False).weights != told


def test_check_says_which_weights_a_model_will_have(folder: Path, checkpoint_factory: Factory):
    def told(model: Path, *, is_here: bool = False, **settings: Any) -> str:
        config = EngineConfig(model=str(model), device="cpu", **settings)
        return check_loadable(model, config, is_here=is_here).weights

    assert told(folder) == told(folder, weights="bf16") == ""
    assert "in int8, in groups of 32 inputs, the output layer's in bfloat16" in told(
        folder, weights="int8", output_weights="bf16"
    )
    assert "in int4, in groups of 32 inputs" in told(folder, weights="int4")
    line = told(folder, is_here=True, weights="int4")
    assert line.endswith(f"; products: {products_here()[0]}") or native.load() is None
    for other in ({"dtype": "float32"}, {"attention": "sdpa"}):
        assert "are widened" in told(folder, is_here=True, weights="int4", **other)
    assert "in int4, in groups" in told(checkpoint_factory("mixtral"), weights="int4")
    assert "stay wide, not int4" in told(checkpoint_factory("gpt-oss"), weights="int4")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"weights": "int5"}, "'int5' is none of: auto, bf16, int8, int4"),
        ({"weights_group": 64}, "this key is gone; int4 has groups of 32 inputs"),
        ({"output_weights": "int8"}, "'int8' is none of: same, bf16"),
        ({"weights": "int8", "quantization": {"quant_method": "torchao"}}, "int8 and quantization"),
        ({"weights": "int4", "tensor_parallel": 2}, "int4 is for one process.*tensor_parallel: 1"),
    ],
    ids=str,
)
def test_settings_that_exclude_each_other_are_refused_by_name(keys: dict[str, Any], reason: str):
    with config_error(rf"^target\.engine\.\w+: {reason}"):
        parse(Config, {"target": {"engine": {"model": "x", **keys}}})


def test_on_a_gpu_transformers_configuration_is_the_remedy():
    config = EngineConfig(model="x", weights="int4")
    check_few_bits(config, torch.device("cpu"))
    check_few_bits(replace(config, weights="auto"), torch.device("cuda", 0))
    with config_error(r"not for cuda:0; use quantization", "weights"):
        check_few_bits(config, torch.device("cuda", 0))


@pytest.mark.skipif(
    importlib.util.find_spec("kernels") is not None, reason="the package that FP8 needs is there"
)
def test_a_package_that_the_first_forward_would_ask_for_is_named_before_anything_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    described = {"quantization_config": {"quant_method": "fp8"}}
    quantised = altered(folder, tmp_path / "quantised", described)
    config = EngineConfig(model=str(quantised), device="cpu")
    # Without a GPU transformers widens such weights, and asks for nothing.
    check_loadable(Path(config.model), config, is_here=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(model, "load_module", None)
    for load in (partial(check_loadable, Path(config.model), is_here=True), load_model):
        with config_error(r"the package kernels, .*pip install kernels"):
            load(config=config)
