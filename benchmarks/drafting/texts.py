"""What the target is asked in `benchmarks.drafting.steps`: Spec-Bench's questions and kinds of work
that it has not got, made from what lies in this repository."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.spec_bench import questions as spec_bench
from benchmarks.structured.schemas import tasks
from benchmarks.support.record import ROOT
from cluster.grammar_spec import GrammarSpec

_EDITED_SHARE = 0.1
# Lines of a held-out file that the target is asked to go on with; shorter ones say too little.
_MIN_CODE_LINES = 6


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation that the target answers.

    turns: what the user says; before the last one stand the target's own plain answers.  grammar:
    of the last answer.  is_predicted: it comes with the plain answer, edited, as its prediction.
    """

    category: str
    turns: tuple[str, ...]
    grammar: GrammarSpec | None = None
    is_predicted: bool = False


def asks(path: Path, per_category: int) -> list[Ask]:
    """Some of each category, the categories one after another."""
    questions = spec_bench.load(path)
    chosen = spec_bench.limit(questions, per_category)
    found = [
        Ask(category, each.turns[:1])
        for category in spec_bench.categories(chosen)
        for each in chosen
        if each.category == category
    ]
    code = [Ask("code", (f"Continue this Python file:\n\n{text}",)) for text in _code()]
    objects = [
        Ask("json", (task.question,), GrammarSpec("json_schema", json.dumps(task.schema)))
        for task in tasks(per_category, seed=1)
    ]
    agents = [Ask("agent turns", each.turns[:2]) for each in questions if len(each.turns) > 1]
    edits = [Ask("edit", each.turns[:1], is_predicted=True) for each in questions[::-1]]
    return [
        *found, *_spread(code, per_category), *objects, *_spread(edits, per_category),
        *_spread(agents, per_category),
    ]  # fmt: skip


def edited(text: str, others: Sequence[str], seed: int) -> str:
    """The text with a tenth of its lines, one at least, from other texts."""
    lines, draw = text.splitlines(keepends=True), random.Random(seed)
    pool = [line for other in others for line in other.splitlines(keepends=True) if line.strip()]
    for index in draw.sample(range(len(lines)), max(round(_EDITED_SHARE * len(lines)), 1)):
        lines[index] = draw.choice(pool)
    return "".join(lines)


def _code() -> list[str]:
    held = [json.loads(line) for line in (ROOT / "models/heldout.jsonl").open(encoding="utf-8")]
    code = [str(each["text"]) for each in held if each["kind"] == "code"]
    return [text for text in code if len(text.splitlines()) >= _MIN_CODE_LINES]


def _spread(found: Sequence[Ask], count: int) -> list[Ask]:
    """So many, evenly from all over."""
    count = min(count, len(found))
    return [found[place * len(found) // count] for place in range(count)]
