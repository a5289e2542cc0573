"""Whole models in native calls: which ones, that they compute the same, and who stays out."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.cpu.causal_lm import NativeForward, native_forward
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.engine import Work
from cluster.engine.loading import model
from tests.support.engine.driver import (
    Factory,
    check_near,
    load_engine,
    prompt,
    rows,
    run,
    varied_works,
)
from tests.support.engine.native import formats, needs_native

pytestmark = [needs_native, pytest.mark.usefixtures("several_threads")]


_ROPE = {"rope_theta": 10000.0, "factor": 4.0}
_LLAMA3 = {
    **_ROPE,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {"head_dim": 16, "rope_parameters": {"rope_type": "linear", **_ROPE}}),
        ("llama", {"head_dim": 48, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral-sliding", {}),
        ("smollm3", {}),  # one layer does not rotate
    ],
    ids=str,
)
def test_what_is_recognised_computes_the_same_also_in_bfloat16(
    architecture: str,
    fields: dict[str, Any],
    kernels: Kernels,
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = checkpoint_factory(architecture, dtype=torch.bfloat16, **fields)
    fused, narrow = load_engine(folder), load_engine(folder, dtype="bfloat16")
    monkeypatch.setattr(model, "native_forward", lambda *_: None)
    plain = load_engine(folder)
    assert fused.model.native is not None
    assert narrow.model.native is not None
    assert formats(fused) == {Format.BF16}
    assert {layer.dtype for layer in narrow.layers} == {torch.bfloat16}
    assert formats(narrow) == {Format.BF16_PRODUCTS if kernels.multiplies_bf16 else Format.BF16}
    for work in varied_works():
        wanted = rows(run(plain, work))
        torch.testing.assert_close(rows(run(fused, work)), wanted, atol=2e-5, rtol=2e-5)
    check_near(narrow, plain)
    exact, rounded = (rows(run(each, varied_works()[0])) for each in (fused, narrow))
    assert not torch.equal(exact, rounded)  # the cache at least is rounded


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {"head_dim": 12}),  # not a multiple of any register
        ("llama", {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", **_ROPE}}),
        ("granite", {}),  # residuals are scaled
        ("olmo2", {}),  # norms stand elsewhere
    ],
    ids=str,
)
def test_what_is_of_another_kind_takes_the_ordinary_path(
    architecture: str, fields: dict[str, Any], checkpoint_factory: Factory
):
    assert load_engine(checkpoint_factory(architecture, **fields)).model.native is None


def test_a_class_that_nobody_compared_takes_the_ordinary_path_and_says_so(
    checkpoint_factory: Factory, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        engine = load_engine(checkpoint_factory("ministral3"))
    assert engine.model.native is None
    assert caplog.text.count("none is made for Ministral3ForCausalLM") == 1


def test_a_layer_with_somebody_elses_hook_stays(
    native_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []

    def hooked(module: Any, *others: Any) -> NativeForward | None:
        module.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
        return native_forward(module, *others)

    monkeypatch.setattr(model, "native_forward", hooked)
    engine = load_engine(native_llama)
    assert engine.model.native is None
    run(engine, Work("a", 0, prompt(3)))
    assert seen
