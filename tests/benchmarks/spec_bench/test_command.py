"""The command: what it refuses, what it continues, and a server that fails."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.spec_bench import __main__ as command
from benchmarks.spec_bench.peers.makers import Programs
from benchmarks.spec_bench.plan import Run, plan
from benchmarks.spec_bench.questions import Question
from benchmarks.spec_bench.servers import Setup
from benchmarks.support.answers import Law
from benchmarks.support.record import Record

SETUP = Setup("", (), "", "", "float32", Programs(), 4, 64, 0, Path())
PEER = "vLLM plain, HTTP"
RUNS = plan(
    [Question(number, "qa", ("a",)) for number in range(8)], [Law("greedy", 0.0)], [1], [PEER], 1
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that were made, in order; the peer's fail."""
    made: list[str] = []

    def answer(
        run: Run, setup: Setup, max_tokens: int, told: Callable[[], object]
    ) -> list[dict[str, Any]]:
        made.append(run.key)
        if run.server == PEER:
            raise RuntimeError("its log says:\nout of memory")
        told()
        return [{"system": block.system, "turns": []} for block in run.blocks]

    monkeypatch.setattr(command, "answer", answer)
    return made


def test_a_server_that_fails_is_left_out_and_the_same_command_goes_on(
    tmp_path: Path, asked: list[str]
):
    record = Record(tmp_path / "some.json", {})
    command.measure(record, RUNS, SETUP, 4)
    assert record.failures == {PEER: "out of memory"}
    assert asked == ["ours/greedy/0", f"{PEER}/greedy/0", "ours/greedy/1"]
    asked.clear()
    command.measure(Record(tmp_path / "some.json", {}), RUNS, SETUP, 4)
    assert asked == [f"{PEER}/greedy/0"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peer", "eagle"], "no 'eagle'; there are vllm-plain, vllm-ngram, vllm-suffix"),
        (["--ways", "smoke"], "--ways: no 'smoke'; there are http, in-process"),
        (["--peer", "vllm-plain"], "vLLM: name an interpreter that has vLLM with --vllm-python"),
        (["--peer", "llama-plain"], "llama.cpp: name llama.cpp's llama-server with --llama-server"),
        (
            ["--peer", "llama-plain", "--llama-server", "x"],
            "llama.cpp: name the model's GGUF file with --gguf",
        ),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (
            ["--peer", "vllm-plain", "--vllm-python", sys.executable],
            "`request` cannot be asked in process",
        ),
    ],
)
def test_a_wrong_word_is_named_with_what_there_is(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "questions.jsonl"
    question = {"question_id": 1, "category": "qa", "turns": ["a"], "request": {"n": 1}}
    path.write_text(json.dumps(question))
    monkeypatch.setattr(
        sys, "argv", ["spec_bench", str(path), "--out", str(tmp_path / "o.json"), *words]
    )
    with pytest.raises(SystemExit, match=message):
        command.main()
    assert not (tmp_path / "o.json").exists()
