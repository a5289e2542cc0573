"""Reasoning is split off, whatever pieces the text comes in."""

from collections.abc import Sequence

import pytest

from cluster.text.dialect import FORMATS, Dialect, ReasoningMarkers, reasoning_style
from cluster.text.prompt import ChatUse
from cluster.text.tool_calls.base import CallFormat, Part

MARKERS = ReasoningMarkers("<think>", "</think>", (7,), (8, 9), frozenset({4}))
# Prompts that say nothing of the reasoning, and that begin it.
OPEN, INSIDE = (1,), (7,)
#  text, prompt, answer, reasoning
CASES = [
    ("<think>hm</think>\n\nYes.", OPEN, "Yes.", "hm"),
    ("\n<think>\nhm\n</think>Yes </think>", OPEN, "Yes </think>", "\nhm\n"),
    ("hm</think>Yes.", INSIDE, "Yes.", "hm"),
    ("Yes <think>", OPEN, "Yes <think>", ""),
    ("\n Yes.", OPEN, "\n Yes.", ""),
    ("<think>never ends </thin", OPEN, "", "never ends </thin"),
    ("<thi", OPEN, "<thi", ""),
    ("", OPEN, "", ""),
]


@pytest.mark.parametrize(("text", "prompt", "answer", "reasoning"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("calls", [None, FORMATS["hermes"]])
def test_it_is_split_off(
    text: str,
    prompt: Sequence[int],
    answer: str,
    reasoning: str,
    size: int,
    calls: CallFormat | None,
):
    reader = Dialect(calls, MARKERS).reader(prompt, ChatUse(reads_calls=True))
    parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
    parts += reader.finish()
    assert "".join(part.text for part in parts if part.kind == "text") == answer
    assert "".join(part.text for part in parts if part.kind == "reasoning") == reasoning


def test_behind_a_prompt_that_ends_the_reasoning_all_is_the_answer_at_once():
    reader = Dialect(markers=MARKERS).reader([7, 8, 9], ChatUse())
    assert [reader.push(text) for text in (" ", "", "<think>")] == [
        [Part(" ")],
        [],
        [Part("<think>")],
    ]
    assert reader.finish() == []


def test_the_prompt_says_where_a_text_begins():
    assert MARKERS.begins_inside([1, 2, 3]) is None
    assert MARKERS.begins_inside([1, 7, 4, 1]) is None  # a message says it
    assert MARKERS.begins_inside([8, 9, 4, 7]) is True
    assert MARKERS.begins_inside([7, 5, 8, 9, 2]) is False
    assert MARKERS.begins_inside([7, *[5] * 30]) is None


def test_the_style_is_known_by_the_template():
    assert reasoning_style("a </think> b") == "think"
    assert reasoning_style("<|channel|>") == "harmony"
    assert reasoning_style("") is None
