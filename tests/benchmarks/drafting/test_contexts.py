"""What the table of contexts is made of, and which bars it judges."""

from __future__ import annotations

from typing import Any

from benchmarks.drafting.contexts import markdown, messages, missed, report_of
from benchmarks.spec_bench.questions import Question


def figures(tokens: float, hits: float) -> dict[str, Any]:
    times = {"draft_ms": 2.0, "step_ms": None}
    return {"figures": {"tokens_per_step": tokens, **times}, "prefix_hits": hits}


RESULTS = {
    "lm/7168": figures(1.2, 0.99),
    "none/1024": figures(1.0, 0.9),
    "lm/1024": figures(1.5, 0.92),
    "none/7168": figures(1.0, 0.99),
}


def test_lengths_stand_in_order_whoever_was_measured_first() -> None:
    lines = markdown(report_of(RESULTS)).splitlines()
    assert "| lm | 1024 / 7168 | 1.50 / 1.20 | 2.0 / 2.0 | - / - | 0.9200 / 0.9900 |" in lines


def test_bars_are_shares_of_the_shortest_and_of_plain_decoding() -> None:
    found = missed(report_of(RESULTS))
    assert [each.split(":")[0] for each in found] == ["lm, 1024", "lm, 7168"]
    assert missed(report_of({"lm/1024": figures(1.5, 0.9), "lm/4096": figures(1.4, 0.9)})) == []


def test_a_message_ends_with_its_own_question_and_begins_with_other_documents() -> None:
    questions = [Question(index, "rag", (f"document {index}",)) for index in range(6)]
    questions += [Question(9, "summarization", ("news",))]
    found = messages(questions, 2)
    assert [text.split("\n\n")[-1] for text in found["rag"]] == ["document 0", "document 3"]
    assert all("document 1" in text and "document 5" in text for text in found["rag"])
    assert len(found["code"]) == 2
