"""Taps are transformers' hidden states, of every row that a step computes and of no other."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.engine.engine import Work
from tests.support.architectures import BY_TEXT, SERVED
from tests.support.choices import by_day
from tests.support.engine.driver import (
    TREE,
    Factory,
    check_rows,
    load_engine,
    load_oracle,
    prompt,
    run,
)
from tests.support.engine.native import needs_native
from tests.support.engine.taps import (
    FLOAT32_BOUND,
    TAPS,
    TapLog,
    errors,
    expected_taps,
)
from tests.support.errors import config_error

# Layers in lists of other names, scaled embeddings, states, and the text's part of a whole.
TAPPED = by_day(
    ["llama", "gemma2", "gpt2", "qwen3.5", "gemma3-vision"],
    [each for each in (*SERVED, *BY_TEXT) if each != "gemma3n"],
)


@pytest.mark.parametrize("architecture", TAPPED)
def test_they_are_the_hidden_states_of_prompts_in_chunks_and_of_trees(
    architecture: str, checkpoint_factory: Factory
):
    folder, text = checkpoint_factory(architecture), prompt(41)
    log = TapLog(load_engine(folder, max_batch_tokens=16), TAPS, load_oracle(folder))
    found = log.run(Work("a", 0, text, TREE))
    assert log.chunks == [("a", 0, 16), ("a", 16, 16), ("a", 32, 9)]
    log.check("a", text, TREE)
    check_rows(found, log.oracle, text, TREE)


@pytest.mark.parametrize("taps", [(-1, 3, -1), (0,)])
def test_any_set_of_taps_in_any_order(llama_folder: Path, taps: tuple[int, ...]):
    log = TapLog(load_engine(llama_folder), taps, load_oracle(llama_folder))
    log.run(Work("a", 0, prompt(20)))
    log.check("a", prompt(20))


@needs_native
def test_a_native_forward_serves_them_itself(native_llama: Path, monkeypatch: pytest.MonkeyPatch):
    engine = load_engine(native_llama)
    assert engine.model.native is not None
    monkeypatch.setattr(engine.model.module, "forward", None)
    log = TapLog(engine, TAPS, load_oracle(native_llama))
    log.run(Work("a", 0, prompt(30), TREE))
    log.check("a", prompt(30), TREE)


@pytest.mark.parametrize(
    ("architecture", "fields"), [("llama", {"head_dim": 16}), ("gemma2", {}), ("gpt2", {})]
)
def test_in_bfloat16_they_are_as_near_as_transformers_own(
    architecture: str, fields: dict[str, int], checkpoint_factory: Factory
):
    """Both are measured against the same weights in float32: what rounding explains of the one
    explains the other."""
    folder = checkpoint_factory(architecture, **fields)
    text = prompt(40)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rounded = expected_taps(own, text, TAPS)
    expected = expected_taps(own.float(), text, TAPS)
    rounding = errors(rounded, expected)
    log = TapLog(load_engine(folder, dtype="bfloat16", max_batch_tokens=16), TAPS)
    log.run(Work("a", 0, text))
    found = errors(log.text("a", 0, len(text)), expected)
    assert (found.mean(dim=0) <= 1.5 * rounding.mean(dim=0) + FLOAT32_BOUND).all()
    assert 1e-4 < rounding[:, -1].mean() < 0.1  # bfloat16 was at work


def test_a_step_that_asks_for_none_has_none_and_leaves_nothing_behind(
    checkpoint_factory: Factory,
):
    engine = load_engine(checkpoint_factory("gemma2"))
    engine.submit(Work("a", 0, prompt(9)))
    engine.step((0, -1))
    assert engine.last_step.taps is not None
    run(engine, Work("a", 9, prompt(1)))
    assert engine.last_step.taps is None
    modules = list(engine.model.module.modules())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in modules)


@pytest.mark.parametrize("tap", [-2, 4])
def test_a_tap_that_is_not_there_is_refused_before_anything_runs(llama_folder: Path, tap: int):
    engine = load_engine(llama_folder)
    engine.submit(Work("a", 0, prompt(9)))
    before = engine.last_step
    with config_error(f"tap {tap} .* taps 0 to 3"):
        engine.step((1, tap))
    assert engine.last_step is before
    assert engine.cached_len("a") == 0
    assert len(engine.step((1,))) == 1


def test_a_model_whose_layers_are_not_found_says_so(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = load_engine(llama_folder)
    engine.model.plain.has_taps = False
    with config_error("LlamaForCausalLM gives no hidden states"):
        engine.step((1,))
    run(engine, Work("a", 0, prompt(5)))


def test_a_model_of_several_states_a_token_gives_none(checkpoint_factory: Factory):
    engine = load_engine(checkpoint_factory("gemma3n"))
    with config_error(r"Gemma3nForCausalLM gives .* several of a token; remove"):
        engine.model.resolve_taps((0,))
