"""Whole layers in one native call: which ones, that they compute the same, and who stays out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.engine.cpu import kernels
from cluster.engine.cpu.decoder_layer import NativeLayer
from cluster.engine.engine import Engine, Work
from cluster.engine.loading import model
from tests.support.engine.driver import load_engine, prompt, random_tree, rows, run, varied_works

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="needs a C++ compiler")

Factory = Callable[..., Path]


def native_layers(engine: Engine) -> list[bool]:
    modules = engine._model.module.modules()
    return [isinstance(each.forward, NativeLayer) for each in modules if hasattr(each, "self_attn")]


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("llama", {"head_dim": 16}, [True, True, True]),
        ("llama", {"head_dim": 48, "attention_bias": True, "mlp_bias": True}, [True] * 3),
        ("llama", {"head_dim": 12}, [False, False, False]),  # not a multiple of any register
        ("qwen2", {}, [True, True, True]),
        ("qwen3", {}, [True, True, True]),
        ("mistral-sliding", {}, [True, True, True]),
        ("granite", {}, [False, False, False]),  # residuals are scaled
        ("smollm3", {}, [True, False, True]),  # one layer does not rotate
        ("olmo2", {}, [False, False, False]),  # norms stand elsewhere
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_recognised_computes_the_same(
    architecture: str,
    fields: dict[str, int],
    expected: list[bool],
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint_factory(architecture, **fields)
    fused = load_engine(folder)
    monkeypatch.setattr(model, "fuse_decoder_layers", lambda module, kernels: 0)
    plain = load_engine(folder)
    assert native_layers(fused) == expected
    assert native_layers(plain) == [False] * 3
    for work in varied_works():
        found, wanted = rows(run(fused, work)), rows(run(plain, work))
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


def test_another_attention_and_other_numbers_are_left_to_the_original(
    checkpoint_factory: Factory,
) -> None:
    folder = checkpoint_factory("llama", head_dim=16)
    reference, narrow = load_engine(folder, attention="sdpa"), load_engine(folder, dtype="bfloat16")
    work = Work("a", 0, prompt(9), random_tree(4, np.random.default_rng(6)))
    expected = rows(run(load_engine(folder), work))
    # The layers are the native ones, which hand over what they are not made for.
    assert native_layers(reference) == [True] * 3
    torch.testing.assert_close(rows(run(reference, work)), expected, atol=2e-5, rtol=2e-5)
    error = (rows(run(narrow, work)) - expected).norm() / expected.norm()
    assert float(error) < 0.1


def test_a_layer_with_somebody_elses_hook_stays(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    fuse = model.fuse_decoder_layers

    def hooked(module: torch.nn.Module, loaded: kernels.Kernels) -> int:
        layers = [each for each in module.modules() if hasattr(each, "self_attn")]
        layers[1].register_forward_hook(lambda *_: seen.append(1))
        return fuse(module, loaded)

    monkeypatch.setattr(model, "fuse_decoder_layers", hooked)
    engine = load_engine(checkpoint_factory("llama", head_dim=16))
    assert native_layers(engine) == [True, False, True]
    run(engine, Work("a", 0, prompt(3)))
    assert seen


@pytest.mark.parametrize(
    ("architecture", "fields", "is_native"),
    [
        ("llama", {"head_dim": 16}, True),
        ("llama", {"head_dim": 16, "tie_word_embeddings": True}, True),
        ("qwen3", {}, True),
        ("mistral-sliding", {}, True),
        ("llama", {"head_dim": 12}, False),
        ("granite", {}, False),
        ("smollm3", {}, False),
        ("gemma2", {}, False),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_whole_forward_is_native_where_all_layers_are(
    architecture: str, fields: dict[str, int], is_native: bool, checkpoint_factory: Factory
) -> None:
    engine = load_engine(checkpoint_factory(architecture, **fields))
    assert (engine._model.native is not None) == is_native


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotations_are_the_models_own(
    rope: dict[str, object], checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint_factory(
        "llama", head_dim=16, rope_parameters={"rope_theta": 10000.0, **rope}
    )
    native = load_engine(folder)
    assert native._model.native is not None
    monkeypatch.setattr(model, "native_forward", lambda module, kernels: None)
    other = load_engine(folder)
    for length in (5, 70, 9):
        work = Work("a", 0, prompt(length, seed=length))
        torch.testing.assert_close(
            rows(run(native, work)), rows(run(other, work)), atol=2e-5, rtol=2e-5
        )
        native.release("a")
        other.release("a")
