"""What an engine says that it computes with is what it computes with."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.engine.reminder import Reminder
from cluster.engine.state import engine_state
from cluster.errors import ConfigError
from tests.support.engine.driver import load_engine
from tests.support.engine.native import needs_native


@needs_native
@pytest.mark.parametrize(("asked", "active"), [("auto", "native"), ("sdpa", "sdpa")])
def test_the_active_attention_kernels_and_cache_are_said(
    asked: str, active: str, llama_folder: Path
):
    engine = load_engine(llama_folder, attention=asked, num_pages=64, page_size=16)
    state = engine_state(engine, "lm")
    said = (state.name, state.device, state.attention, state.graphs)
    assert said == ("lm", "cpu", active, "none")
    assert state.kernels == ("native" if engine.model.native else "packed")
    assert state.kv_tokens == 64 * 16
    assert state.kv_bytes == sum(layer.nbytes for layer in engine.cache.layers)
    assert state.fallbacks == ()


@needs_native
def test_attention_that_was_given_up_at_load_is_a_fallback_with_its_reason(
    llama_folder: Path,
):
    engine = load_engine(llama_folder, attention="auto")
    engine.forward.settle(Mock(side_effect=[ConfigError("a layer is wrong"), None]))
    state = engine_state(engine)
    assert state.attention == "sdpa"
    assert state.fallbacks == ("attention: the slower reference is used: a layer is wrong",)


@needs_native
@pytest.mark.parametrize("settings", [{"attention": "native"}, {"reproducible": True}])
def test_attention_that_was_asked_for_is_refused_and_not_replaced(
    native_llama: Path, settings: dict[str, Any]
):
    # Heads of a size that the native kernels attend with, as reproducible mode wants.
    engine = load_engine(native_llama, **settings)
    with pytest.raises(ConfigError, match="a layer is wrong"):
        engine.forward.settle(Mock(side_effect=ConfigError("a layer is wrong")))
    assert engine_state(engine).attention == "native"


def test_a_fallback_is_said_again_every_ten_minutes(caplog: pytest.LogCaptureFixture):
    times = iter([0.0, 1.0, 599.0, 601.0, 602.0, 1300.0, 1301.0])
    reminder = Reminder(lambda: next(times))
    for _ in range(5):
        reminder.tick(lambda: ["attention: sdpa", "steps run without CUDA graphs"])
    assert len(caplog.messages) == 2 * 2
    assert "the GPU serves more slowly than it could: attention: sdpa" in caplog.messages
    reminder.tick(list)
    assert len(caplog.messages) == 2 * 2
