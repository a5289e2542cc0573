"""Peers in process: prompts and conversations on an engine that is stepped by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.spec_bench import asking
from benchmarks.spec_bench.client import Turn
from benchmarks.spec_bench.peers.engines import Conversations, Output
from benchmarks.spec_bench.peers.makers import Programs
from benchmarks.spec_bench.plan import Block, Run
from benchmarks.spec_bench.questions import Question
from benchmarks.spec_bench.servers import Setup
from benchmarks.support.answers import Law


@dataclass
class ToyEngine:
    """Writes two tokens for every request, one a step; refuses prompts with "long" in them."""

    running: dict[str, list[int]] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    most: int = 0

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        self.prompts.append(" / ".join(f"{each['role']}: {each['content']}" for each in messages))
        return [len(self.prompts) - 1]

    def add(self, name: str, prompt: list[int], asked: Any, *, to_the_end: bool) -> bool:
        if not to_the_end and "long" in self.prompts[prompt[0]]:
            return False
        self.running[name] = []
        self.most = max(self.most, len(self.running))
        return True

    def step(self) -> list[Output]:
        outputs = []
        for name, ids in list(self.running.items()):
            ids.append(len(ids))
            reason = "length" if len(ids) == 2 else ""
            statistics = {"steps": 1, "drafted": 4, "accepted": 1}
            outputs.append(Output(name, list(ids), reason, f"answer {name}", statistics))
            if reason:
                del self.running[name]
        return outputs


def asked(*turns: tuple[str, ...], concurrency: int = 2) -> dict[str, Any]:
    questions = [
        {"id": number, "category": "qa", "turns": list(each)} for number, each in enumerate(turns)
    ]
    return {"questions": questions, "max_tokens": 2, "temperature": 0.0, "concurrency": concurrency}


def test_a_conversation_goes_on_with_its_own_answers_at_the_level_asked_for() -> None:
    engine, ended = ToyEngine(), []
    conversations = Conversations(engine, lambda: ended.append(None))
    reply = conversations.answer(asked(("a", "b"), ("c",), ("d",)))
    assert engine.most == 2
    assert len(ended) == 3
    turns = [Turn.of(each) for each in reply["turns"]]
    assert sorted((each.question_id, each.turn) for each in turns) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
    ]
    (first,) = [each for each in turns if (each.question_id, each.turn) == (0, 0)]
    assert f"user: a / assistant: {first.text} / user: b" in engine.prompts
    assert (first.num_tokens, first.steps, first.drafted, first.accepted) == (2, 1, 4, 1)
    assert first.submitted_s <= first.first_s < first.last_s


def test_a_conversation_that_is_refused_counts_nothing() -> None:
    engine, ended = ToyEngine(), []
    conversations = Conversations(engine, lambda: ended.append(None))
    reply = conversations.answer(asked(("long",), ("a", "long"), ("b",)))
    assert sorted(reply["refused"]) == [0, 1]
    assert [each["question_id"] for each in reply["turns"]] == [2]
    assert len(ended) == 3


def test_texts_are_continued_to_the_end_as_many_at_a_time_as_asked_for() -> None:
    engine = ToyEngine()
    texts = asked((), (), (), concurrency=2)
    for number, question in enumerate(texts["questions"]):
        question["prompt"] = [5, number]
    reply = Conversations(engine, lambda: None).answer(texts)
    assert engine.prompts == []
    assert engine.most == 2
    assert [each["num_tokens"] for each in reply["turns"]] == [2, 2, 2]
    assert {each["turn"] for each in reply["turns"]} == {0}


_ENGINE = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    for question in asked["questions"]:
        print("answered", flush=True)
    turns = [{"question_id": each["id"], "text": "x" * 999} for each in asked["questions"]]
    print(json.dumps({"turns": turns, "refused": [7]}), flush=True)
"""


def test_a_run_in_process_tells_of_each_answer_and_keeps_little_of_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'engine.py'}\n")
    script.chmod(0o755)
    (tmp_path / "engine.py").write_text(_ENGINE)
    setup = Setup("", (), "model", "", "float32", Programs(str(script)), 2, 64, 0, tmp_path)
    block = Block(
        "vLLM plain, in process", 2, (Question(1, "qa", ("a",)), Question(2, "qa", ("b",)))
    )
    run = Run(block.system, Law("greedy", 0.0), 0, (block, block))
    ended: list[None] = []
    found = asking.answer(run, setup, 4, lambda: ended.append(None))
    assert len(ended) == 4
    assert [each["refused"] for each in found] == [[7], [7]]
    assert [turn["question_id"] for turn in found[0]["turns"]] == [1, 2]
    assert len(json.dumps(found)) < 2000
