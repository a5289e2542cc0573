"""Graphed steps give what eager ones give; where there can be no graph, steps run eagerly.

Without a GPU a double stands for CUDA: what it "captures" it calls again, and so it shows whether
that can be called again, on whatever the words on the device say by then.  The kernels run under
Triton's interpreter, for which this file runs itself in a process of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.config import EngineConfig
from cluster.core import TokenTree
from cluster.engine.attention.triton import layout as triton_layout
from cluster.engine.engine import Engine
from cluster.engine.graphs import forward
from cluster.engine.graphs.capture import Staging
from cluster.engine.loading.model import load_model
from cluster.engine.work import Work
from tests.support.engine.captures import Failing, Recorder, stale
from tests.support.engine.driver import prompt, random_tree, rows
from tests.support.engine.taps import TapLog

ROOT = Path(__file__).resolve().parents[3]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
has_triton = importlib.util.find_spec("triton") is not None
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in a process of its own")
needs_gpu = pytest.mark.skipif(
    IS_INTERPRETED or not (has_triton and torch.cuda.is_available()),
    reason="this machine has no NVIDIA GPU",
)
Steps = Sequence[Sequence[Work]]


@pytest.mark.skipif(IS_INTERPRETED or not has_triton, reason="this is the process of its own")
def test_the_interpreted_tests_of_this_file_pass() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__))],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout
    assert " passed" in process.stdout


def build(folder: Path, capture: Any = None, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "page_size": 4, "num_pages": 256,
        "max_batch_tokens": 16, "attention": "triton", "cuda_graphs": capture is not None,
    }  # fmt: skip
    config = EngineConfig(model=str(folder), **{**defaults, **settings})
    return Engine(config, load_model(config), capture=capture)


def answers(engine: Engine, steps: Steps) -> list[torch.Tensor]:
    """The logits of all works; those of one step are submitted together."""
    found: list[torch.Tensor] = []
    for works in steps:
        for work in works:
            engine.submit(work)
        outputs = {}
        while engine.has_pending:
            outputs |= {output.request_id: output for output in engine.step()}
        found += [rows(outputs[work.request_id]) for work in works]
        for work in works:
            engine.retain(work.request_id, [], range(len(work.tree)))
    return found


def check_equal(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float = 2e-5
) -> None:
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, atol=tolerance, rtol=tolerance)


def _tree(size: int) -> TokenTree:
    return random_tree(size, np.random.default_rng(size))


def _decoding(names: str, start: int, count: int) -> Steps:
    """A prompt each, then one token each per step."""
    first = [Work(name, 0, prompt(start, seed=ord(name))) for name in names]
    return [
        first,
        *([Work(name, start + at, prompt(1, seed=at)) for name in names] for at in range(count)),
    ]


def _growing() -> Steps:
    """A tree whose first nodes stay cached while it grows, then one without new context."""
    small = TokenTree.of([5, 6, 7], [-1, 0, 0])
    large = TokenTree.of([5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, 1, 2, 2, 4])
    return [
        [Work("a", 0, prompt(9), small)],
        [Work("a", 9, prompt(0), large, num_cached_nodes=3)],
        [Work("a", 9, prompt(2), small)],
    ]


MIXED = "a prompt beside a tree and a decoding row"
CHUNKS = "a prompt of several chunks"
APART = "a page has other numbers in layers with a window, behind a text whose windows slid"
OTHERS = (("mistral-sliding", MIXED), ("gemma2", "cached nodes"), ("gemma3", APART))
CASES: dict[str, Steps] = {
    "one sequence, its context growing": _decoding("a", 14, 4),
    "several sequences, of several widths": [*_decoding("abc", 14, 1), *_decoding("d", 5, 1)],
    "trees of several sizes in one width": [
        [Work("a", 0, prompt(17), _tree(5))],
        [Work("a", 17, prompt(1), _tree(7))],
        [Work("a", 18, prompt(1), _tree(4))],
    ],
    MIXED: [
        [Work("a", 0, prompt(20)), Work("b", 0, prompt(6, seed=2))],
        [
            Work("a", 20, prompt(1), _tree(4)),
            Work("b", 6, prompt(1)),
            Work("c", 0, prompt(7, seed=3)),
        ],
    ],
    "cached nodes": _growing(),
    CHUNKS: [[Work("a", 0, prompt(40), _tree(3))]],
    APART: [[Work("a", 0, prompt(33))], [Work("b", 0, prompt(12), _tree(4))]],
}


@pytest.fixture
def many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that contexts of a few blocks are split."""
    from cluster.engine.attention.triton import backend as triton_attention

    monkeypatch.setattr(triton_attention, "_PROGRAMS_WITHOUT_GPU", 12)
    monkeypatch.setattr(triton_attention, "_MAX_BLOCK_KEYS", 16)
    monkeypatch.setattr(triton_layout, "_MIN_SPLIT_KEYS", 16)


@interpreted
@pytest.mark.usefixtures("many_programs")
@pytest.mark.parametrize(("architecture", "name"), [*(("llama", name) for name in CASES), *OTHERS])
def test_graphed_steps_give_the_logits_of_eager_ones(
    checkpoint_factory: Callable[..., Path], architecture: str, name: str
) -> None:
    folder, recorder = checkpoint_factory(architecture), Recorder()
    graphed = build(folder, recorder, prefix_cache=False)
    before = recorder.num_replays
    found = answers(graphed, CASES[name])
    assert recorder.num_replays - before >= len(CASES[name])
    check_equal(found, answers(build(folder, prefix_cache=False), CASES[name]))


@interpreted
@pytest.mark.usefixtures("many_programs")
def test_one_graph_serves_a_context_while_its_items_become_more(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, eager = build(llama_folder, Recorder()), build(llama_folder)
    split: list[int] = []
    combined = triton_layout._split_rows

    def counted(*arguments: Any) -> Any:
        words = combined(*arguments)
        split.append(len(words))
        return words

    first = [[Work("a", 0, prompt(12))], [Work("a", 12, prompt(1))]]
    answers(engine, first)
    num_captures = engine.forward.graphs.num_graphs  # type: ignore[union-attr]
    monkeypatch.setattr(triton_layout, "_split_rows", counted)
    steps = [[Work("a", 13 + at, prompt(1, seed=at))] for at in range(6)]
    found = answers(engine, steps)
    monkeypatch.undo()
    assert split[0] == 0
    assert split[-1] > 0
    assert engine.forward.graphs.num_graphs == num_captures  # type: ignore[union-attr]
    answers(eager, first)
    check_equal(found, answers(eager, steps))


@interpreted
def test_a_form_is_captured_once_and_replayed_from_then_on(llama_folder: Path) -> None:
    recorder = Recorder()
    engine = build(llama_folder, recorder)
    answers(engine, _decoding("ab", 6, 2))
    captures, replays = recorder.num_captures, recorder.num_replays
    assert captures > 0
    engine.release("a"), engine.release("b")
    answers(engine, _decoding("ab", 6, 2))
    assert recorder.num_captures == captures
    assert recorder.num_replays == replays + 3


@interpreted
def test_nothing_is_captured_later_that_was_captured_ahead(llama_folder: Path) -> None:
    recorder = Recorder()
    engine = build(llama_folder, recorder, max_batch_tokens=8)
    engine.capture_ahead()
    captures = recorder.num_captures
    expected = answers(build(llama_folder, max_batch_tokens=8), CASES["cached nodes"])
    check_equal(answers(engine, CASES["cached nodes"]), expected)
    answers(engine, _decoding("bcd", 5, 2))
    assert recorder.num_captures == captures == engine.forward.graphs.num_graphs  # type: ignore[union-attr]


@interpreted
def test_taps_of_graphed_steps_are_those_of_eager_ones(llama_folder: Path) -> None:
    recorder = Recorder()
    logs = [TapLog(build(llama_folder, each), (2, -1)) for each in (None, recorder)]
    logs[1].engine.capture_ahead((2, -1))
    num_captures, num_replays = recorder.num_captures, recorder.num_replays
    expected, found = ([answers(log.engine, CASES[MIXED]), log] for log in logs)
    check_equal(found[0], expected[0])
    for name, rows_by_position in expected[1].context.items():
        check_equal([*found[1].context[name].values()], [*rows_by_position.values()])
        check_equal([found[1].nodes[name]], [expected[1].nodes[name]])
    assert recorder.num_captures == num_captures
    assert recorder.num_replays >= num_replays + 2


@interpreted
def test_a_replay_touches_no_memory_that_its_capture_did_not_touch(llama_folder: Path) -> None:
    recorder = Recorder(notes_storages=True)
    engine = build(llama_folder, recorder)
    answers(engine, [*_decoding("a", 6, 3), [Work("a", 9, prompt(1), _tree(3))]])
    replayed = [met for met in recorder.storages if len(met) > 2]
    assert replayed
    for captured, *replays in recorder.storages:
        assert captured
        assert all(met == captured for met in replays)


@interpreted
def test_a_steps_logits_are_left_alone_by_the_next(llama_folder: Path) -> None:
    engine = build(llama_folder, Recorder())
    (first,) = answers(engine, [[Work("a", 0, prompt(3))]])
    kept = first.clone()
    answers(engine, [[Work("b", 0, prompt(3, seed=9))]])
    assert torch.equal(first, kept)


@interpreted
def test_a_capture_that_fails_is_told_once_and_never_tried_again(
    llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    with caplog.at_level(logging.WARNING):
        engine = build(llama_folder, failing)
        engine.capture_ahead()
        found = answers(engine, CASES["trees of several sizes in one width"])
    assert failing.num_calls == 1
    assert not engine.uses_graphs
    (told,) = [record.message for record in caplog.records if "graphs" in record.message]
    assert told.endswith("RuntimeError: operation not permitted when stream is capturing")
    check_equal(found, answers(build(llama_folder), CASES["trees of several sizes in one width"]))


@interpreted
def test_without_memory_for_graphs_steps_run_eagerly(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(forward, "Staging", refuse)
    with caplog.at_level(logging.WARNING):
        engine = build(llama_folder, Recorder())
    assert not engine.uses_graphs
    assert "steps run without CUDA graphs: out of memory" in caplog.text
    assert len(answers(engine, [[Work("a", 0, prompt(3))]])) == 1


@interpreted
def test_graphs_that_give_wrong_logits_are_given_up_at_load(
    llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build(llama_folder, stale)
    assert not engine.uses_graphs
    assert "steps run without CUDA graphs: ConfigError" in caplog.text
    steps = _decoding("a", 6, 2)
    check_equal(answers(engine, steps), answers(build(llama_folder), steps))


@interpreted
def test_steps_wider_than_every_graph_run_eagerly(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "WIDTHS", (1, 2, 4, 8))
    recorder = Recorder()
    engine = build(llama_folder, recorder)
    replays = recorder.num_replays
    found = answers(engine, [[Work("a", 0, prompt(9))]])
    assert recorder.num_replays == replays
    assert engine.uses_graphs
    check_equal(found, answers(build(llama_folder), [[Work("a", 0, prompt(9))]]))
    answers(engine, [[Work("b", 0, prompt(8))]])
    assert recorder.num_replays == replays + 1


@interpreted
def test_steps_of_more_slots_than_fit_run_eagerly(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_MAX_REST_WORDS", 40)
    recorder = Recorder()
    engine = build(llama_folder, recorder, max_batch_tokens=8)
    answers(engine, [[Work("a", 0, prompt(80))]])
    replays = recorder.num_replays
    steps = [[Work("a", 80, prompt(8))]]
    found = answers(engine, steps)
    assert recorder.num_replays == replays
    assert engine.uses_graphs
    eager = build(llama_folder, max_batch_tokens=8)
    answers(eager, [[Work("a", 0, prompt(80))]])
    check_equal(found, answers(eager, steps))
    answers(engine, [[Work("b", 0, prompt(8))]])
    assert recorder.num_replays == replays + 1


@interpreted
def test_a_model_whose_heads_the_kernels_do_not_serve_has_no_graphs(
    checkpoint_factory: Callable[..., Path],
) -> None:
    recorder = Recorder()
    engine = build(checkpoint_factory("qwen3", head_dim=272), recorder)
    assert not engine.uses_graphs
    assert recorder.num_captures == 0


@pytest.mark.parametrize(
    "settings", [{"attention": "sdpa"}, {"attention": "sdpa", "cuda_graphs": False}]
)
def test_without_the_kernels_nothing_is_captured(
    llama_folder: Path, settings: dict[str, Any]
) -> None:
    recorder = Recorder()
    assert not build(llama_folder, recorder, **settings).uses_graphs
    assert recorder.num_captures == 0


@interpreted
def test_graphs_can_be_turned_off(llama_folder: Path) -> None:
    recorder = Recorder()
    assert not build(llama_folder, recorder, cuda_graphs=False).uses_graphs
    assert recorder.num_captures == 0
    assert build(llama_folder, recorder).uses_graphs


@interpreted
def test_a_model_on_a_cpu_has_no_graphs_of_its_own(llama_folder: Path) -> None:
    engine = build(llama_folder, None, cuda_graphs=True)
    assert not engine.uses_graphs
    assert forward.reserved_bytes(engine.config, engine.model) == 0


def test_the_areas_of_the_host_take_turns_and_only_what_was_written_is_sent() -> None:
    staging = Staging(6, torch.device("cpu"))
    first = staging.area()
    first[:] = 1
    staging.send(2)
    assert staging.words.tolist() == [1, 1, 0, 0, 0, 0]
    second = staging.area()
    second[:] = 2
    assert first.tolist() == [1] * 6
    staging.send(4)
    assert staging.words.tolist() == [2, 2, 2, 2, 0, 0]
    assert staging.area() is not second
    assert staging.words.tolist() == [2, 2, 2, 2, 0, 0]


@needs_gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral-sliding", "gemma2"])
def test_graphs_of_a_gpu_give_the_logits_of_eager_steps(
    checkpoint_factory: Callable[..., Path], architecture: str
) -> None:
    folder = checkpoint_factory(architecture)
    settings: dict[str, Any] = {"device": "cuda:0", "attention": "auto"}
    graphed = build(folder, None, cuda_graphs=True, **settings)
    eager = build(folder, None, cuda_graphs=False, **settings)
    graphed.capture_ahead()
    assert graphed.uses_graphs
    num_graphs = graphed.forward.graphs.num_graphs  # type: ignore[union-attr]
    for steps in CASES.values():
        check_equal(answers(graphed, steps), answers(eager, steps), 1e-4)
        for name in "abcd":
            graphed.release(name), eager.release(name)
    assert graphed.forward.graphs.num_graphs == num_graphs  # type: ignore[union-attr]
