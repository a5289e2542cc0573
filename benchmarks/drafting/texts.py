"""The prompts of `benchmarks.drafting.steps`: Spec-Bench's questions, and further kinds of work
made from files of this repository."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.spec_bench import questions as spec_bench
from benchmarks.structured.schemas import tasks
from benchmarks.support.record import ROOT
from cluster.requests.grammar_spec import GrammarSpec

# Categories in addition to those of Spec-Bench.
KINDS = ("code", "json", "edit", "agent turns")
_EDITED_SHARE = 0.1
# An agent's conversation: the first call's question is a task's own.
_FURTHER_CALLS = ("Now another one that differs in every value.", "And a third one.")
# Lines of a held-out file that the target is asked to continue; fewer lines determine too little.
_MIN_CODE_LINES = 6


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation that the target answers.

    turns: the user's messages; the earlier ones are answered by the target without drafts.  schema:
    of every answer.  is_predicted: the request has the edited plain answer as its prediction.
    """

    category: str
    turns: tuple[str, ...]
    schema: dict[str, Any] | None = None
    is_predicted: bool = False

    @property
    def grammar(self) -> GrammarSpec | None:
        return GrammarSpec("json_schema", json.dumps(self.schema)) if self.schema else None

    def question(self, number: int, prediction: str) -> dict[str, Any]:
        """Return the ask as a line of `benchmarks.spec_bench`'s files; number: its id and seed."""
        request: dict[str, Any] = {}
        if self.schema:
            form = {"name": "answer", "strict": True, "schema": self.schema}
            request["response_format"] = {"type": "json_schema", "json_schema": form}
        if self.is_predicted:
            request["prediction"] = {"type": "content", "content": prediction}
        return {
            "question_id": number, "category": self.category, "turns": self.turns,
            "request": request,
        }  # fmt: skip


def asks(path: Path, per_category: int) -> list[Ask]:
    """Return some asks of each category, the categories one after another."""
    questions = spec_bench.load(path)
    chosen = spec_bench.limit(questions, per_category)
    found = [
        Ask(category, each.turns[:1])
        for category in spec_bench.categories(chosen)
        for each in chosen
        if each.category == category
    ]
    code = [Ask("code", (f"Continue this Python file:\n\n{text}",)) for text in _code()]
    objects = [Ask("json", (task.question,), task.schema) for task in tasks(per_category, seed=1)]
    agents = [
        Ask("agent turns", (task.question, *_FURTHER_CALLS), task.schema)
        for task in tasks(per_category, seed=2)
    ]
    edits = [Ask("edit", each.turns[:1], is_predicted=True) for each in questions[::-1]]
    return [
        *found, *_spread(code, per_category), *objects, *_spread(edits, per_category), *agents,
    ]  # fmt: skip


def edited(text: str, others: Sequence[str], seed: int) -> str:
    """Replace a tenth of the text's words, and at least one, by words of other texts: all words of
    some lines, and the first words of the last such line."""
    draw = random.Random(seed)
    lines = [_words(line) for line in text.splitlines(keepends=True)]
    pool = [word for other in others for word in _words(other)]
    left = max(round(_EDITED_SHARE * sum(map(len, lines))), 1)
    for index in draw.sample(range(len(lines)), len(lines)):
        count = min(left, len(lines[index]), len(pool))
        start = draw.randint(0, len(pool) - count)
        lines[index][:count] = pool[start : start + count]
        left -= count
    return "".join(word for line in lines for word in line)


def _words(text: str) -> list[str]:
    """Split a text into words, each with the white space after it."""
    return re.findall(r"\S+\s*|\s+", text)


def _code() -> list[str]:
    held = [json.loads(line) for line in (ROOT / "models/heldout.jsonl").open(encoding="utf-8")]
    code = [str(each["text"]) for each in held if each["kind"] == "code"]
    return [text for text in code if len(text.splitlines()) >= _MIN_CODE_LINES]


def _spread(found: Sequence[Ask], count: int) -> list[Ask]:
    """Select `count` asks at even distances."""
    count = min(count, len(found))
    return [found[place * len(found) // count] for place in range(count)]
