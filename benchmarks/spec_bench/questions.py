"""Questions in Spec-Bench's form, and how they are shared out over the runs of a server.

One JSON object a line: {"question_id", "category", "turns": [str]}.  No questions come with this
repository; Spec-Bench's own are in its question.jsonl (Xia et al. 2024, hemingkx/Spec-Bench).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Spec-Bench reports the categories of MT-bench, which have few questions each, together.
_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation: `turns` are what the user says, one after each answer."""

    id: int
    task: str
    turns: tuple[str, ...]


def load(path: Path) -> list[Question]:
    """The questions of a file; ValueError names the line that is none."""
    questions = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            category, turns = str(data["category"]), tuple(map(str, data["turns"]))
            task = "mt_bench" if category in _MT_BENCH else category
            questions.append(Question(int(data["question_id"]), task, turns))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: not a question ({error!r}); expected a JSON object with "
                "question_id, category and turns, as in Spec-Bench's question.jsonl"
            ) from error
    if len({question.id for question in questions}) < len(questions):
        raise ValueError(f"{path}: a question_id occurs twice")
    return questions


def tasks(questions: Sequence[Question]) -> list[str]:
    """The tasks in the order of their first question."""
    return list(dict.fromkeys(question.task for question in questions))


def share_out(questions: Sequence[Question], num_groups: int) -> list[list[Question]]:
    """Disjoint groups with as equal shares of every task as their numbers allow."""
    groups: list[list[Question]] = [[] for _ in range(num_groups)]
    order = tasks(questions)
    by_task = sorted(questions, key=lambda question: order.index(question.task))
    for index, question in enumerate(by_task):  # a task goes on where the last one ended
        groups[index % num_groups].append(question)
    return groups


def limit(questions: Sequence[Question], per_task: int | None) -> list[Question]:
    """The first `per_task` questions of each task; None = all."""
    if per_task is None:
        return list(questions)
    seen: dict[str, int] = {}
    chosen = []
    for question in questions:
        seen[question.task] = seen.get(question.task, 0) + 1
        if seen[question.task] <= per_task:
            chosen.append(question)
    return chosen
