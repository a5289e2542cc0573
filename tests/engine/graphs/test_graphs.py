"""Graphed steps give what eager ones give; where there can be no graph, steps run eagerly.

Without a GPU a double stands for CUDA: what it "captures" it calls again, and so it shows whether
that can be called again, on whatever the words on the device say by then.  The kernels run under
Triton's interpreter: test_interpreted.py runs these tests.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.attention.triton import layout as triton_layout
from cluster.engine.graphs import forward
from cluster.engine.graphs.capture import Staging
from cluster.engine.work import Work
from tests.support.choices import by_day
from tests.support.engine.captures import Failing, Recorder, stale
from tests.support.engine.driver import Factory, prompt
from tests.support.engine.graphs import (
    ALL,
    CASES,
    FEW_LAYERS,
    GEMMA2,
    MIXED,
    answers,
    build,
    check_equal,
    decoding,
)
from tests.support.engine.interpreter import interpreted, needs_gpu
from tests.support.engine.taps import TapLog
from tests.support.engine.triton_cases import tree_of_size


@pytest.fixture(scope="module")
def small_llama(checkpoint_factory: Factory) -> Path:
    """Of one layer: the interpreter takes as long for each."""
    return checkpoint_factory("llama", **FEW_LAYERS["llama"])


@pytest.fixture
def many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that contexts of a few blocks are split."""
    from cluster.engine.attention.triton import backend as triton_attention

    monkeypatch.setattr(triton_attention, "_PROGRAMS_WITHOUT_GPU", 6)
    monkeypatch.setattr(triton_attention, "_MAX_BLOCK_KEYS", 16)
    monkeypatch.setattr(triton_layout, "_MIN_SPLIT_KEYS", 16)


@interpreted
@pytest.mark.usefixtures("many_programs")
@pytest.mark.parametrize(("architecture", "names"), by_day([GEMMA2], [*ALL]), ids=str)
def test_graphed_steps_give_the_logits_of_eager_ones(
    checkpoint_factory: Factory, architecture: str, names: tuple[str, ...]
):
    folder, recorder = checkpoint_factory(architecture, **FEW_LAYERS[architecture]), Recorder()
    graphed = build(folder, recorder, fused=True, prefix_cache=False)
    eager = build(folder, prefix_cache=False)
    for steps in map(CASES.__getitem__, names):
        before = recorder.num_replays
        found = answers(graphed, steps)
        assert recorder.num_replays - before >= len(steps)
        check_equal(found, answers(eager, steps))
        for name in "abcd":
            graphed.release(name), eager.release(name)


@interpreted
@pytest.mark.usefixtures("many_programs")
def test_one_graph_serves_a_context_while_its_items_become_more(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    engine, eager = build(small_llama, Recorder()), build(small_llama)
    split = []
    combined = triton_layout._split_rows

    def counted(*arguments: Any) -> Any:
        words = combined(*arguments)
        split.append(len(words))
        return words

    first = [[Work("a", 0, prompt(12))], [Work("a", 12, prompt(1))]]
    answers(engine, first)
    num_captures = engine.forward.graphs.num_graphs
    monkeypatch.setattr(triton_layout, "_split_rows", counted)
    steps = [[Work("a", 13 + at, prompt(1, seed=at))] for at in range(6)]
    found = answers(engine, steps)
    monkeypatch.undo()
    assert split[0] == 0 < split[-1]
    assert engine.forward.graphs.num_graphs == num_captures
    answers(eager, first)
    check_equal(found, answers(eager, steps))


@interpreted
def test_taps_of_graphed_steps_are_those_of_eager_ones(checkpoint_factory: Factory):
    folder = checkpoint_factory("llama", **FEW_LAYERS["llama"] | {"num_hidden_layers": 2})
    recorder = Recorder()
    engines = build(folder), build(folder, recorder, fused=True)
    logs = [TapLog(each, (1, -1)) for each in engines]
    logs[1].engine.capture_ahead((1, -1))
    num_captures, num_replays = recorder.num_captures, recorder.num_replays
    expected, found = ([answers(log.engine, CASES[MIXED]), log] for log in logs)
    check_equal(found[0], expected[0])
    for name, rows_by_position in expected[1].context.items():
        check_equal([*found[1].context[name].values()], [*rows_by_position.values()])
        check_equal([found[1].nodes[name]], [expected[1].nodes[name]])
    assert recorder.num_captures == num_captures
    assert recorder.num_replays >= num_replays + 2


@interpreted
def test_a_replay_touches_no_memory_that_its_capture_did_not_touch(small_llama: Path):
    recorder = Recorder(notes_storages=True)
    engine = build(small_llama, recorder, fused=True)
    answers(engine, [*decoding("a", 6, 3), [Work("a", 9, prompt(1), tree_of_size(3))]])
    replayed = [met for met in recorder.storages if len(met) > 2]
    assert replayed
    for captured, *replays in recorder.storages:
        assert captured
        assert all(met == captured for met in replays)


@interpreted
def test_a_chunk_beside_texts_is_replayed_and_more_logits_than_a_graph_has_are_not(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(forward, "LOGIT_ROWS", 4)
    recorder = Recorder()
    engine, eager = build(small_llama, recorder), build(small_llama)
    steps = [
        [Work("a", 0, prompt(9)), Work("b", 0, prompt(3))],
        [Work("a", 9, prompt(1), tree_of_size(4))],
    ]
    replays = []
    for step in steps:
        before = recorder.num_replays
        check_equal(answers(engine, [step]), answers(eager, [step]))
        replays.append(recorder.num_replays - before)
    assert replays == [1, 0]


@interpreted
def test_a_steps_logits_are_left_alone_by_the_next(small_llama: Path):
    engine = build(small_llama, Recorder())
    (first,) = answers(engine, [[Work("a", 0, prompt(3))]])
    kept = first.clone()
    answers(engine, [[Work("b", 0, prompt(3, seed=9))]])
    assert torch.equal(first, kept)


def test_the_areas_of_the_host_take_turns_and_only_what_was_written_is_sent():
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
    checkpoint_factory: Factory, architecture: str
):
    folder = checkpoint_factory(architecture)
    settings = {"device": "cuda:0", "attention": "auto"}
    graphed = build(folder, None, fused=True, cuda_graphs=True, **settings)
    eager = build(folder, None, cuda_graphs=False, **settings)
    graphed.capture_ahead()
    assert graphed.uses_graphs
    num_graphs = graphed.forward.graphs.num_graphs
    for steps in CASES.values():
        check_equal(answers(graphed, steps), answers(eager, steps), 1e-4)
        for name in "abcd":
            graphed.release(name), eager.release(name)
    assert graphed.forward.graphs.num_graphs == num_graphs


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
    engine = build(small_llama, failing)
    engine.capture_ahead()
    steps = CASES["trees of several sizes in one width"]
    found = answers(engine, steps)
    assert failing.num_calls == 1
    assert not engine.uses_graphs
    (told,) = [record.message for record in caplog.records if "graphs" in record.message]
    assert told.endswith("RuntimeError: operation not permitted when stream is capturing")
    check_equal(found, answers(build(small_llama), steps))


@interpreted
def test_without_memory_for_graphs_steps_run_eagerly(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(forward, "Staging", refuse)
    engine = build(small_llama, Recorder())
    assert not engine.uses_graphs
    told = "steps run without CUDA graphs: out of memory"
    assert told in caplog.text
    assert engine.forward.fallbacks == (told,)
    assert len(answers(engine, [[Work("a", 0, prompt(3))]])) == 1


@interpreted
def test_graphs_that_give_wrong_logits_are_given_up_at_load(
    small_llama: Path, caplog: pytest.LogCaptureFixture
):
    engine = build(small_llama, stale)
    assert not engine.uses_graphs
    (reason,) = engine.forward.fallbacks
    assert reason.startswith("steps run without CUDA graphs: ConfigError")
    assert reason in caplog.text
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
