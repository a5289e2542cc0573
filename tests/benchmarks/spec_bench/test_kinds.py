"""Questions of further kinds: texts of every kind, and predictions that are nearly right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.spec_bench.kinds import asks, edited
from benchmarks.spec_bench.questions import load
from benchmarks.support.options import sampling

KINDS = ["code", "json", "edit", "agent turns"]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    held = [
        {"question_id": index, "category": "qa" if index % 2 else "rag", "turns": ["one", "two"]}
        for index in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, held)))
    return path


def test_every_kind_of_text_is_asked_for_and_kinds_stand_together(questions: Path) -> None:
    found = asks(questions, 2)
    assert [each.category for each in found] == [name for name in KINDS for _ in range(2)]
    of = {each.category: each for each in found}
    assert of["json"].schema
    assert of["edit"].is_predicted
    assert len(of["agent turns"].turns) == 3
    assert of["agent turns"].schema
    assert len(of["code"].turns[0].splitlines()) > 6


@pytest.mark.parametrize("num_lines", [1, 3, 40])
def test_a_tenth_of_the_words_is_from_other_texts(num_lines: int) -> None:
    num_words = 120 // num_lines
    text = "".join(" ".join(["word"] * num_words) + "\n" for _ in range(num_lines))
    changed = edited(text, ["some others here\n" * 20], seed=3)
    pairs = zip(text.split(), changed.split(), strict=True)
    assert sum(before != after for before, after in pairs) == 12


def test_questions_are_those_of_the_other_benchmark(questions: Path, tmp_path: Path) -> None:
    """With the schema and the prediction that go with them."""
    found = asks(questions, 2)
    path = tmp_path / "kinds.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(each.question(number, "as before")) for number, each in enumerate(found)
        )
    )
    read = {each.category: each for each in load(path)}
    assert list(read) == KINDS
    assert read["edit"].request == {"prediction": {"type": "content", "content": "as before"}}
    schema = read["json"].request["response_format"]["json_schema"]["schema"]
    assert schema["type"] == "object"
    assert not read["code"].request


def test_a_law_is_a_temperature_with_top_p_and_top_k() -> None:
    law = sampling("t0.7,p0.9,k50", 4)
    assert (law.temperature, law.top_p, law.top_k, law.max_tokens) == (0.7, 0.9, 50, 4)
    assert sampling("greedy", 4).temperature == 0.0
    with pytest.raises(ValueError, match="law 'x1'"):
        sampling("x1", 4)
