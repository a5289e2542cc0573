"""Whole layers in one native call: which ones, that they compute the same, and who stays out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine import decoder
from cluster.engine.comparison import Comparison
from cluster.engine.cpu.decoder_layer import NativeLayer
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.engine import Engine, Work
from cluster.engine.loading import model
from tests.support.engine.driver import (
    check_equal_works,
    check_near,
    load_engine,
    prompt,
    rows,
    run,
    varied_works,
)
from tests.support.engine.native import formats, needs_native

pytestmark = [needs_native, pytest.mark.usefixtures("several_threads")]

Factory = Callable[..., Path]


def native_layers(engine: Engine) -> list[bool]:
    modules = engine.model.module.modules()
    return [isinstance(each.forward, NativeLayer) for each in modules if hasattr(each, "self_attn")]


ALL, NONE = [True] * 3, [False] * 3


@pytest.mark.parametrize(
    ("architecture", "fields", "expected", "is_whole"),
    [
        ("llama", {"head_dim": 16}, ALL, True),
        ("llama", {"head_dim": 48, "attention_bias": True, "mlp_bias": True}, ALL, True),
        ("llama", {"head_dim": 32, "tie_word_embeddings": True}, ALL, True),
        ("llama", {"head_dim": 12}, NONE, False),  # not a multiple of any register
        ("qwen2", {}, ALL, True),
        ("qwen3", {}, ALL, True),
        ("mistral-sliding", {}, ALL, True),
        ("granite", {}, NONE, False),  # residuals are scaled
        ("smollm3", {}, [True, False, True], False),  # one layer does not rotate
        ("olmo2", {}, NONE, False),  # norms stand elsewhere
        ("gemma2", {}, [False] * 4, False),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_recognised_computes_the_same_also_in_bfloat16(
    architecture: str,
    fields: dict[str, int],
    expected: list[bool],
    is_whole: bool,
    kernels: Kernels,
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint_factory(architecture, dtype=torch.bfloat16, **fields)
    fused, narrow = load_engine(folder), load_engine(folder, dtype="bfloat16")
    monkeypatch.setattr(model, "fuse_decoder_layers", lambda module, comparison, kernels: 0)
    plain = load_engine(folder)
    assert native_layers(fused) == expected
    assert not any(native_layers(plain))
    assert (fused.model.native is not None) == (narrow.model.native is not None) == is_whole
    assert formats(fused) == {Format.BF16}
    assert {layer.dtype for layer in narrow.layers} == {torch.bfloat16}
    if all(layer.head_dim % kernels.lanes == 0 for layer in narrow.layers):
        products = Format.BF16_PRODUCTS if kernels.multiplies_bf16 else Format.BF16
        assert formats(narrow) == {products}
    check_equal_works(fused, plain)
    check_near(narrow, plain)
    exact, rounded = (rows(run(each, varied_works()[0])) for each in (fused, narrow))
    assert not torch.equal(exact, rounded)  # the cache at least is rounded


def test_a_class_that_nobody_compared_takes_the_ordinary_path_and_says_so(
    checkpoint_factory: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine = load_engine(checkpoint_factory("ministral3"))
    assert native_layers(engine) == NONE
    assert engine.model.native is None
    assert caplog.text.count("none are made for Ministral3ForCausalLM") == 1


@pytest.mark.parametrize(("original_len", "is_native"), [(32, False), (100_000, True)])
def test_a_layer_that_depends_on_positions_is_found_out_near_the_limit(
    original_len: int,
    is_native: bool,
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were its class ever taken for one of the family.  Its queries are scaled from original_len
    on; with a longer one its layers are what they look like."""
    name = "transformers.models.ministral3.modeling_ministral3.Ministral3ForCausalLM"
    monkeypatch.setattr(decoder, "_CLASSES", frozenset({name}))
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": original_len,
    }
    engine = load_engine(checkpoint_factory("ministral3", rope_parameters=rope))
    assert native_layers(engine) == [is_native] * 3


def test_a_layer_with_somebody_elses_hook_stays(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    fuse = model.fuse_decoder_layers

    def hooked(module: torch.nn.Module, comparison: Comparison, loaded: Kernels) -> int:
        layers = [each for each in module.modules() if hasattr(each, "self_attn")]
        layers[1].register_forward_hook(lambda *_: seen.append(1))
        return fuse(module, comparison, loaded)

    monkeypatch.setattr(model, "fuse_decoder_layers", hooked)
    engine = load_engine(checkpoint_factory("llama", head_dim=16))
    assert native_layers(engine) == [True, False, True]
    run(engine, Work("a", 0, prompt(3)))
    assert seen


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotations_are_the_models_own(
    rope: dict[str, object], checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint_factory(
        "llama", head_dim=16, rope_parameters={"rope_theta": 10000.0, **rope}
    )
    native = load_engine(folder)
    assert native.model.native is not None
    monkeypatch.setattr(model, "native_forward", lambda module, comparison, kernels: None)
    other = load_engine(folder)
    check_equal_works(native, other)
