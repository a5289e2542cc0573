"""Writes questions of further kinds of work for `benchmarks.spec_bench`.

    python -m benchmarks.spec_bench.kinds QUESTIONS --config configs/local.yaml --out kinds.jsonl

Code to go on with, JSON by a schema of its own, edits with a prediction, and an agent's calls.
QUESTIONS: Spec-Bench's JSONL, from which the edits are made.  A prediction is the target's answer
under the law with a tenth of its words replaced, so a file is valid for one law and for answers of
at most `--max-tokens`.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.spec_bench.questions import load
from benchmarks.spec_bench.schemas import tasks
from benchmarks.support.options import add_config_options, parser_of
from benchmarks.support.prompts import excerpts
from cluster.config.file import load as load_config
from cluster.config.schema import Config
from cluster.core import SamplingParams
from cluster.local import LLM

_EDITED_SHARE = 0.1
# An agent's conversation: the first call's question is a task's own.
_FURTHER_CALLS = ("Now another one that differs in every value.", "And a third one.")
# Lines of a held-out file that the target is asked to continue; fewer lines determine too little.
_MIN_CODE_LINES = 6


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation.

    turns: the user's messages.  schema: of every answer.  is_predicted: the request has the edited
    plain answer as its prediction.
    """

    category: str
    turns: tuple[str, ...]
    schema: dict[str, Any] | None = None
    is_predicted: bool = False

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


def asks(path: Path, count: int) -> list[Ask]:
    """Return `count` asks of each kind, the kinds one after another."""
    code = [Ask("code", (f"Continue this Python file:\n\n{text}",)) for text in _code()]
    objects = [Ask("json", (task.question,), task.schema) for task in tasks(count, seed=1)]
    agents = [
        Ask("agent turns", (task.question, *_FURTHER_CALLS), task.schema)
        for task in tasks(count, seed=2)
    ]
    edits = [Ask("edit", each.turns[:1], is_predicted=True) for each in load(path)[::-1]]
    return [*_spread(code, count), *objects, *_spread(edits, count), *agents]


def predictions(config: Config, asked: Sequence[Ask], law: SamplingParams) -> dict[int, str]:
    """Return what the predicted ones among the asks predict, by their place."""
    places = [place for place, each in enumerate(asked) if each.is_predicted]
    with LLM(replace(config, drafters={}, tasks={})) as llm:
        if llm.tokenizer is None:
            raise SystemExit(f"{config.target.engine.model} has no tokenizer; name a chat model")
        prompts = [
            llm.tokenizer.apply_chat_template([{"role": "user", "content": asked[place].turns[0]}])
            for place in places
        ]
        answers = llm.generate(list(prompts), [replace(law, seed=place + 1) for place in places])
    texts = [answer.text for answer in answers]
    return {place: edited(text, texts, place) for place, text in zip(places, texts, strict=True)}


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
    code = [each.text for each in excerpts() if each.kind == "code"]
    return [text for text in code if len(text.splitlines()) >= _MIN_CODE_LINES]


def _spread(found: Sequence[Ask], count: int) -> list[Ask]:
    """Select `count` asks at even distances."""
    count = min(count, len(found))
    return [found[place * len(found) // count] for place in range(count)]


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("questions", type=Path)
    add_config_options(parser, "configs/local.yaml")
    parser.add_argument("--per-kind", type=int, default=12, help="questions of each kind")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(words)
    asked = asks(arguments.questions, arguments.per_kind)
    law = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    predicted = predictions(load_config(arguments.config, arguments.overrides).config, asked, law)
    lines = [
        json.dumps(each.question(place + 1, predicted.get(place, "")))
        for place, each in enumerate(asked)
    ]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
