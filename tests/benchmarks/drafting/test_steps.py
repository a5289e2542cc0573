"""What the table of drafters is made of: texts of every kind, averages, cells without figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.drafting.steps import Figures, averaged, calibration_errors, markdown
from benchmarks.drafting.texts import KINDS, asks, edited
from benchmarks.spec_bench.questions import load
from benchmarks.support.options import sampling

METRICS = """
drafthouse_survival_calibration_error{drafter="a",law="greedy",task="math"} 0.1
drafthouse_survival_calibration_error{drafter="b",law="greedy",task="math"} 0.3
drafthouse_survival_calibration_error{drafter="b",law="greedy",task="code"} 0.9
"""


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    held = [
        {"question_id": index, "category": "qa" if index % 2 else "rag", "turns": ["one", "two"]}
        for index in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, held)))
    return path


def test_every_kind_of_text_is_asked_for_and_categories_stand_together(questions: Path) -> None:
    found = asks(questions, 2)
    order = [each.category for each in found]
    assert list(dict.fromkeys(order)) == ["rag", "qa", "code", "json", "edit", "agent turns"]
    assert order == [name for name in dict.fromkeys(order) for _ in range(2)]
    of = {each.category: each for each in found}
    assert of["json"].grammar is not None
    assert of["edit"].is_predicted
    assert len(of["agent turns"].turns) == 3
    assert of["agent turns"].grammar is not None
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
    found = [each for each in asks(questions, 2) if each.category in KINDS]
    path = tmp_path / "kinds.jsonl"
    path.write_text(
        "\n".join(
            json.dumps(each.question(number, "as before")) for number, each in enumerate(found)
        )
    )
    read = {each.category: each for each in load(path)}
    assert set(read) == set(KINDS)
    assert read["edit"].request == {"prediction": {"type": "content", "content": "as before"}}
    schema = read["json"].request["response_format"]["json_schema"]["schema"]
    assert schema["type"] == "object"
    assert not read["code"].request


def test_errors_are_those_of_the_task() -> None:
    assert calibration_errors(METRICS, "math") == [0.1, 0.3]
    assert calibration_errors(METRICS, "none") == []


def test_averages_leave_out_what_was_not_measured() -> None:
    mean = averaged(
        {"a": Figures(1.0, None, 2.0, 8.0, 0.1, None), "b": Figures(2.0, 3.0, 4.0, 6.0, 0.3, None)}
    )
    assert mean == Figures(1.5, 3.0, 3.0, 7.0, 0.2, None)


def test_tables_have_a_row_for_each_drafter_and_a_column_for_each_category() -> None:
    figures = {
        "qa": Figures(1.5, 2.0, 0.51, 1.5, 0.25, None),
        "math": Figures(2.5, 3.0, 1.5, 1.5, 0.5, 0.1),
    }
    lines = markdown({"greedy": {"lm": figures, "lm+suffix": figures}}).splitlines()
    assert lines.count("| drafter | qa | math | mean |") == 6
    assert "| lm+suffix | 1.50 | 2.50 | 2.00 |" in lines
    assert "| greedy | 2.00 | 2.00 |" in lines
    assert "| lm | - | 0.100 | 0.100 |" in lines
    assert "| lm | 25% | 50% | 38% |" in lines


def test_a_law_is_a_temperature_with_top_p_and_top_k() -> None:
    law = sampling("t0.7,p0.9,k50", 4)
    assert (law.temperature, law.top_p, law.top_k, law.max_tokens) == (0.7, 0.9, 50, 4)
    assert sampling("greedy", 4).temperature == 0.0
    with pytest.raises(ValueError, match="law 'x1'"):
        sampling("x1", 4)
