"""Reasoning is split off, whatever pieces the text comes in."""

from __future__ import annotations

import pytest

from cluster.text.reasoning import ReasoningMarkers, ReasoningSplitter, reasoning_style

MARKERS = ReasoningMarkers("<think>", "</think>", (7,), (8, 9))
#  text, whether the prompt has begun the reasoning, answer, reasoning
CASES = [
    ("<think>hm</think>\n\nYes.", None, "Yes.", "hm"),
    ("\n<think>\nhm\n</think>Yes </think>", None, "Yes </think>", "\nhm\n"),
    ("hm</think>Yes.", True, "Yes.", "hm"),
    ("Yes <think>", None, "Yes <think>", ""),
    ("Yes.", False, "Yes.", ""),
    ("<think>never ends </thin", None, "", "never ends </thin"),
    ("<thi", None, "<thi", ""),
    ("", None, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "answer", "reasoning"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_it_is_split_off(
    text: str, inside: bool | None, answer: str, reasoning: str, size: int
) -> None:
    splitter = ReasoningSplitter(MARKERS, begins_inside=inside)
    parts = [splitter.push(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(splitter.finish())
    assert "".join(part[0] for part in parts) == answer
    assert "".join(part[1] for part in parts) == reasoning


def test_the_prompt_says_where_a_text_begins() -> None:
    assert MARKERS.begins_inside([1, 2, 3]) is None
    assert MARKERS.begins_inside([1, 7]) is True
    assert MARKERS.begins_inside([7, 5, 8, 9, 2]) is False
    assert MARKERS.begins_inside([7, *[5] * 30]) is None


def test_the_style_is_known_by_the_template() -> None:
    assert reasoning_style("a </think> b") == "think"
    assert reasoning_style("<|channel|>") == "harmony"
    assert reasoning_style("") is None
