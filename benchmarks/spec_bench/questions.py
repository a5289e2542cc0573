"""Reads questions in Spec-Bench's form, and distributes them over the runs of a server.

One JSON object a line: {"question_id", "category", "turns": [str]}, and "request" where a question
has fields of its own for every request.  No questions come with this repository; Spec-Bench's own
are in its question.jsonl (Xia et al. 2024, hemingkx/Spec-Bench).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.support.prompts import prompts
from cluster.records import frozen

# Spec-Bench reports the categories of MT-bench, which have few questions each, together.
_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@frozen
class Question:
    """A conversation: `turns` are what the user says, one after each answer.

    request: fields of the HTTP request beside those of every question, as `response_format`.
    prompt: instead of turns, the tokens of a text that is to be continued.  task: of it.
    """

    id: int
    category: str
    turns: tuple[str, ...] = ()
    request: dict[str, Any] = field(default_factory=dict)
    prompt: tuple[int, ...] = ()
    task: str = ""


def load(path: Path) -> list[Question]:
    """Return the questions of a file; raises ValueError with the number of a malformed line."""
    questions = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            name, turns = str(data["category"]), tuple(map(str, data["turns"]))
            category = "mt_bench" if name in _MT_BENCH else name
            request = dict(data.get("request", {}))
            questions.append(Question(int(data["question_id"]), category, turns, request))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: not a question ({error!r}); expected a JSON object with "
                "question_id, category and turns, as in Spec-Bench's question.jsonl"
            ) from error
    if len({question.id for question in questions}) < len(questions):
        raise ValueError(f"{path}: a question_id occurs twice")
    return questions


def held_out(count: int, kinds: Sequence[str], tokenizer: Any) -> list[Question]:
    """`count` texts of `benchmarks.support.prompts` to be continued, the kinds in turn."""
    made = prompts(count, tokenizer, kinds)
    return [
        Question(index, each.kind, prompt=each.token_ids, task=each.task)
        for index, each in enumerate(made)
    ]


def categories(questions: Sequence[Question]) -> dict[str, list[Question]]:
    """The questions of each category, in the order of their first question."""
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(question.category, []).append(question)
    return found


def share_out(questions: Sequence[Question], weights: Sequence[int]) -> list[list[Question]]:
    """Divide the questions into disjoint groups with sizes in proportion to `weights`; every
    category is divided in the same proportion as far as its number allows."""
    groups: list[list[Question]] = [[] for _ in weights]
    owed = [0] * len(weights)
    for question in chain(*categories(questions).values()):
        # The group that is furthest behind its share gets the next one.
        owed = [debt + weight for debt, weight in zip(owed, weights, strict=True)]
        behind = owed.index(max(owed))
        owed[behind] -= sum(weights)
        groups[behind].append(question)
    return groups


def rotated(questions: Sequence[Question], share: float) -> list[Question]:
    """Rotate the questions of each category, so that they begin after `share` of it."""
    turned = []
    for own in categories(questions).values():
        start = int(share * len(own))
        turned += [*own[start:], *own[:start]]
    return turned


def limit(questions: Sequence[Question], per_category: int | None) -> list[Question]:
    """`per_category` questions of each category, evenly from all over the file; None = all."""
    if per_category is None:
        return list(questions)
    chosen = []
    for own in categories(questions).values():
        count = min(per_category, len(own))
        chosen += [own[place * len(own) // count] for place in range(count)]
    return chosen
