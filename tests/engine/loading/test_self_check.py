"""The check at load accepts what is right but for rounding, and nothing that lacks a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.cpu.decoder_layer import NativeLayer
from cluster.engine.engine import Engine
from cluster.engine.loading import self_check
from cluster.errors import ConfigError
from tests.support.engine.driver import load_engine
from tests.support.engine.native import needs_native

# Trained, so that one layer less changes the logits by less than a coarse format's worst noise.
TRAINED = Path("models/demo-target")


def decoder_layers(engine: Engine) -> list[Any]:
    return list(engine.model.module.model.layers)


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_native_layer_with_anothers_weights_is_refused(dtype: str) -> None:
    engine = load_engine(TRAINED, dtype=dtype)
    assert engine.model.native is not None
    self_check.check(engine, engine.model)
    wrong, other = (decoder_layers(engine)[index].forward for index in (3, 2))
    assert isinstance(wrong, NativeLayer)
    wrong.weights.out, wrong.weights.down = other.weights.out, other.weights.down
    with pytest.raises(ConfigError, match="logits are off by"):
        self_check.check(engine, engine.model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_skips_a_layer_is_refused(dtype: str) -> None:
    engine = load_engine(TRAINED, dtype=dtype, attention="sdpa")
    self_check.check(engine, engine.model)

    def skip(module: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        return given[0] if named.get("plan") is not None else output  # the reference has none

    decoder_layers(engine)[3].register_forward_hook(skip, with_kwargs=True)
    with pytest.raises(ConfigError, match="logits are off by"):
        self_check.check(engine, engine.model)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_rounding_in_a_deep_random_network_is_accepted(
    attention: str, checkpoint_factory: Callable[..., Path]
) -> None:
    folder = checkpoint_factory("llama", head_dim=16, num_hidden_layers=24, init_std=0.1)
    engine = load_engine(folder, dtype="bfloat16", attention=attention)
    assert {layer.dtype for layer in engine.layers} == {torch.bfloat16}
