"""When a graph is captured, and where there can be none, steps run eagerly.

With the double of `tests/engine/graphs/test_graphs.py`, under the interpreter as there.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.graphs import forward
from cluster.engine.work import Work
from tests.support.engine.captures import Failing, Recorder, stale
from tests.support.engine.driver import prompt
from tests.support.engine.graphs import (
    CASES,
    answers,
    build,
    check_equal,
    decoding,
)
from tests.support.engine.interpreter import interpreted


@interpreted
def test_a_form_is_captured_once_and_replayed_from_then_on(small_llama: Path):
    recorder = Recorder()
    engine = build(small_llama, recorder)
    answers(engine, decoding("ab", 6, 2))
    captures, replays = recorder.num_captures, recorder.num_replays
    assert captures > 0
    engine.release("a"), engine.release("b")
    answers(engine, decoding("ab", 6, 2))
    assert recorder.num_captures == captures
    assert recorder.num_replays == replays + 3


@interpreted
def test_a_capture_that_fails_is_told_once_and_never_tried_again(
    small_llama: Path, caplog: pytest.LogCaptureFixture
):
    failing = Failing()
    with caplog.at_level(logging.WARNING):
        engine = build(small_llama, failing)
        engine.capture_ahead()
        found = answers(engine, CASES["trees of several sizes in one width"])
    assert failing.num_calls == 1
    assert not engine.uses_graphs
    (told,) = [record.message for record in caplog.records if "graphs" in record.message]
    assert told.endswith("RuntimeError: operation not permitted when stream is capturing")
    check_equal(found, answers(build(small_llama), CASES["trees of several sizes in one width"]))


@interpreted
def test_without_memory_for_graphs_steps_run_eagerly(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(forward, "Staging", refuse)
    with caplog.at_level(logging.WARNING):
        engine = build(small_llama, Recorder())
    assert not engine.uses_graphs
    assert "steps run without CUDA graphs: out of memory" in caplog.text
    assert engine.forward.fallbacks == ("steps run without CUDA graphs: out of memory",)
    assert len(answers(engine, [[Work("a", 0, prompt(3))]])) == 1


@interpreted
def test_graphs_that_give_wrong_logits_are_given_up_at_load(
    small_llama: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        engine = build(small_llama, stale)
    assert not engine.uses_graphs
    assert "steps run without CUDA graphs: ConfigError" in caplog.text
    (reason,) = engine.forward.fallbacks
    assert reason.startswith("steps run without CUDA graphs: ConfigError")
    steps = decoding("a", 6, 2)
    check_equal(answers(engine, steps), answers(build(small_llama), steps))


@interpreted
def test_steps_of_more_slots_than_fit_run_eagerly(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(forward, "_MAX_REST_WORDS", 40)
    recorder = Recorder()
    engine = build(small_llama, recorder, max_batch_tokens=8)
    answers(engine, [[Work("a", 0, prompt(80))]])
    replays = recorder.num_replays
    steps = [[Work("a", 80, prompt(8))]]
    found = answers(engine, steps)
    assert recorder.num_replays == replays
    assert engine.uses_graphs
    eager = build(small_llama, max_batch_tokens=8)
    answers(eager, [[Work("a", 0, prompt(80))]])
    check_equal(found, answers(eager, steps))
    answers(engine, [[Work("b", 0, prompt(8))]])
    assert recorder.num_replays == replays + 1


@interpreted
def test_graphs_can_be_turned_off(small_llama: Path):
    recorder = Recorder()
    assert not build(small_llama, recorder, cuda_graphs=False).uses_graphs
    assert recorder.num_captures == 0
    assert build(small_llama, recorder).uses_graphs
