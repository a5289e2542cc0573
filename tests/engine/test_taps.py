"""Taps are transformers' hidden states, of every row that a step computes and of no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core import TokenTree
from cluster.engine.engine import Work
from cluster.engine.graphs.compiled import CompiledForward
from cluster.engine.paths import StepInputs, StepOutputs
from cluster.engine.types import Ability
from cluster.errors import ConfigError
from tests.support.checkpoints import SERVED
from tests.support.engine.driver import (
    GreedyDecoder,
    expected_rows,
    load_engine,
    load_oracle,
    prompt,
    random_tree,
    rows,
    run,
)
from tests.support.engine.native import needs_native
from tests.support.engine.taps import (
    FLOAT32_BOUND,
    TAPS,
    TapLog,
    errors,
    expected_nodes,
    expected_taps,
)

Factory = Callable[..., Path]

TREE = TokenTree.of([5, 6, 7, 8], [-1, 0, 0, -1])


@pytest.mark.parametrize("architecture", SERVED)
def test_they_are_the_hidden_states_of_prompts_in_chunks_and_of_trees(
    architecture: str, checkpoint_factory: Factory
) -> None:
    log = TapLog.of(checkpoint_factory(architecture), max_batch_tokens=16)
    text = prompt(41)
    found = log.run(Work("a", 0, text, TREE))
    assert log.chunks == [("a", 0, 16), ("a", 16, 16), ("a", 32, 9)]
    log.check("a", text, TREE)
    expected = expected_rows(log.oracle, text, TREE)
    torch.testing.assert_close(rows(found), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("taps", [(3,), (-1, 3, -1), (0,), (0, 1, 2, 3)])
def test_any_set_of_taps_in_any_order(llama_folder: Path, taps: tuple[int, ...]) -> None:
    log = TapLog.of(llama_folder, taps)
    log.run(Work("a", 0, prompt(20)))
    log.check("a", prompt(20))


@needs_native
def test_a_native_forward_serves_them_itself(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint_factory("llama", head_dim=16)
    engine = load_engine(folder)
    assert engine.model.native is not None
    assert Ability.TAPS in engine.model.native.abilities

    def fails(*_: Any, **__: Any) -> Any:
        raise AssertionError("transformers' forward was called")

    monkeypatch.setattr(engine.model.module, "forward", fails)
    log = TapLog(engine, TAPS, load_oracle(folder))
    log.run(Work("a", 0, prompt(30), TREE))
    log.check("a", prompt(30), TREE)


@pytest.mark.parametrize(
    ("architecture", "fields"), [("llama", {"head_dim": 16}), ("gemma2", {}), ("gpt2", {})]
)
def test_in_bfloat16_they_are_as_near_as_transformers_own(
    architecture: str, fields: dict[str, int], checkpoint_factory: Factory
) -> None:
    """Both are measured against the same weights in float32: what rounding explains of the one
    explains the other."""
    folder = checkpoint_factory(architecture, **fields)
    text = prompt(40)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().float()
    expected = expected_taps(exact, text, TAPS)
    rounding = errors(expected_taps(own, text, TAPS), expected)
    log = TapLog(load_engine(folder, dtype="bfloat16", max_batch_tokens=16), TAPS)
    log.run(Work("a", 0, text))
    found = errors(log.text("a", 0, len(text)), expected)
    assert (found.mean(dim=0) <= 1.5 * rounding.mean(dim=0) + FLOAT32_BOUND).all()
    assert 1e-4 < rounding[:, -1].mean() < 0.1  # bfloat16 was at work


def test_rows_of_a_cached_prefix_have_none(llama_folder: Path) -> None:
    log = TapLog.of(llama_folder)
    first, second = prompt(30), np.concatenate((prompt(30)[:22], prompt(9, seed=4)))
    log.run(Work("a", 0, first))
    log.run(Work("b", 0, second))
    assert log.engine.last_step.num_prefix_hit_tokens == 20
    assert log.chunks == [("a", 0, 30), ("b", 20, 11)]
    log.check("b", second, start=20)
    log.engine.retain("b", [])
    log.run(Work("b", 25, second[25:]))  # a rollback: what is held already is not computed again
    assert log.chunks[-1] == ("b", 30, 1)


def test_an_accepted_path_has_the_taps_of_its_nodes_and_the_next_step_goes_on(
    llama_folder: Path,
) -> None:
    log = TapLog.of(llama_folder)
    context = prompt(11)
    log.run(Work("a", 0, context, TREE))
    path = log.nodes["a"][[0, 2]]
    log.engine.retain("a", [0, 2])
    text = np.concatenate((context, TREE.token_ids[[0, 2]], prompt(1, seed=9)))
    log.run(Work("a", 13, text[13:]))
    assert log.chunks[-1] == ("a", 13, 1)
    found = torch.cat((log.text("a", 0, 11), path, log.text("a", 13, 14)))
    assert errors(found, expected_taps(log.oracle, text, TAPS)).max() <= FLOAT32_BOUND


def test_nodes_that_are_cached_have_none(llama_folder: Path) -> None:
    log = TapLog.of(llama_folder)
    context = prompt(11)
    log.run(Work("a", 0, context, TREE))
    log.engine.retain("a", [], range(4))
    grown = TokenTree.of([*TREE.token_ids.tolist(), 9, 10], [*TREE.parents.tolist(), 1, 3])
    log.run(Work("a", 11, context[:0], grown, num_cached_nodes=4))
    assert log.chunks[-1] == ("a", 11, 0)
    expected = expected_nodes(log.oracle, context, grown, TAPS)[4:]
    assert errors(log.nodes["a"], expected).max() <= FLOAT32_BOUND


def test_preempted_texts_are_tapped_again(llama_folder: Path) -> None:
    log = TapLog.of(llama_folder, num_pages=16, max_batch_tokens=16, prefix_cache=False)
    prompts = {"a": prompt(5, seed=1), "b": prompt(9, seed=2), "c": prompt(20, seed=3)}
    decoder = GreedyDecoder(log.engine, prompts, 24)
    texts = decoder.run()
    assert decoder.num_misses > 0
    starts = [start for name, start, _ in log.chunks if name == "c"]
    assert starts.count(0) > 1
    for name, start in prompts.items():
        # The last token was drawn, and never computed.
        text = np.array([*start.tolist(), *texts[name]])[:-1]
        log.check(name, text)


def test_requests_in_one_step_get_their_own_rows(llama_folder: Path) -> None:
    log = TapLog.of(llama_folder)
    generator = np.random.default_rng(0)
    texts = {name: prompt(5 + 4 * index, seed=index) for index, name in enumerate("abc")}
    trees = {name: random_tree(3, generator) for name in texts}
    for name, text in texts.items():
        log.engine.submit(Work(name, 0, text, trees[name]))
    assert len(log.engine.step()) == 3
    for name, text in texts.items():
        log.check(name, text, trees[name])


def test_a_step_that_asks_for_none_has_none_and_leaves_nothing_behind(
    checkpoint_factory: Factory,
) -> None:
    engine = load_engine(checkpoint_factory("gemma2"))
    engine.submit(Work("a", 0, prompt(9)))
    engine.step((0, -1))
    assert engine.last_step.taps is not None
    run(engine, Work("a", 9, prompt(1)))
    assert engine.last_step.taps is None
    modules = list(engine.model.module.modules())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in modules)


@pytest.mark.parametrize("tap", [-2, 4])
def test_a_tap_that_is_not_there_is_refused_before_anything_runs(
    llama_folder: Path, tap: int
) -> None:
    engine = load_engine(llama_folder)
    engine.submit(Work("a", 0, prompt(9)))
    before = engine.last_step
    with pytest.raises(ConfigError, match=f"tap {tap} .* taps 0 to 3"):
        engine.step((1, tap))
    assert engine.last_step is before
    assert engine.cached_len("a") == 0
    assert len(engine.step((1,))) == 1


class Deaf:
    """A path that serves logits alone."""

    def __init__(self, serve: Callable[[StepInputs], StepOutputs]) -> None:
        self.abilities: frozenset[Ability] = frozenset()
        self.num_calls = 0
        self._serve = serve

    def __call__(self, inputs: StepInputs) -> StepOutputs:
        self.num_calls += 1
        return self._serve(inputs)


def test_a_step_takes_a_path_that_serves_what_it_needs(llama_folder: Path) -> None:
    engine = load_engine(llama_folder)
    deaf = Deaf(engine.model.plain)
    model: Any = replace(engine.model, native=None, compiled=deaf)
    engine.forward._model = model
    log = TapLog(engine, TAPS, load_oracle(llama_folder))
    log.run(Work("a", 0, prompt(12)))
    log.check("a", prompt(12))
    assert deaf.num_calls == 0
    log.taps = ()
    log._take = lambda summary: None  # type: ignore[method-assign]
    log.run(Work("a", 12, prompt(1)))
    assert deaf.num_calls == 1
    assert CompiledForward.abilities == frozenset()


def test_a_model_whose_layers_are_not_found_says_so(llama_folder: Path) -> None:
    engine = load_engine(llama_folder)
    object.__setattr__(engine.model.plain, "abilities", frozenset())
    with pytest.raises(ConfigError, match="LlamaForCausalLM gives no hidden states"):
        engine.step((1,))
    run(engine, Work("a", 0, prompt(5)))
