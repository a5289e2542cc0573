"""Measures drafters inside the target, each alone or several merged, by kind of text.

    python -m benchmarks.drafting.steps QUESTIONS --config configs/local.yaml \\
        --drafters lm suffix lm+suffix --laws greedy t0.7 t0.7,p0.9 t1,k20 --markdown steps.md

QUESTIONS: Spec-Bench's JSONL; code, JSON, edits with a prediction and second turns are added to its
categories (`benchmarks.drafting.texts`).  The target answers some questions of each category with
each drafter.  A step verifies a fixed number of nodes, so tokens per step do not depend on the
machine's speed; the cost of drafting does.  A drafter that the configuration lacks is given by
`--set drafters.NAME.kind=KIND`.  The same command goes on where it was interrupted.

A `prediction` is the target's answer without drafts, with a tenth of its words replaced by words of
other answers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from tqdm import tqdm

from benchmarks.drafting.texts import Ask, asks, edited
from benchmarks.support.options import parser_of, sampling
from benchmarks.support.page import head, number, row
from benchmarks.support.record import OUT, Record
from cluster.config.file import load
from cluster.config.schema import Config, DrafterPlacement
from cluster.core import SamplingParams, SpeculationStats
from cluster.local import LLM


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one category.

    tokens_per_step: over all steps.  acceptance_len: over those that verified drafts, the bonus
    token included.  draft_ms: a step's drafting, of all drafters together.  step_ms: the target's
    time per step, its reading of the prompts included.  draft_share: of the time of drafting and
    steps.  calibration_error: mean over the drafters.  None: nothing to
    measure.
    """

    tokens_per_step: float
    acceptance_len: float | None
    draft_ms: float | None
    step_ms: float | None
    draft_share: float | None
    calibration_error: float | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """An `Ask` as token ids, with its seed and its prediction."""

    ask: Ask
    token_ids: list[int]
    seed: int
    prediction: str = ""
    predicted_ids: tuple[int, ...] = ()


def prepare(config: Config, asked: Sequence[Ask], law: SamplingParams) -> list[Prompt]:
    """Return the prompts, which contain the target's answers without drafts to earlier turns."""
    with LLM(replace(config, drafters={}, tasks={})) as llm:
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise SystemExit(f"{config.target.engine.model} has no tokenizer; name a chat model")
        spoken = [[{"role": "user", "content": each.turns[0]}] for each in asked]

        def prompt(index: int) -> list[int]:
            return list(tokenizer.apply_chat_template(spoken[index]))

        def answers(indices: Sequence[int]) -> dict[int, str]:
            if not indices:
                return {}
            params = [
                replace(law, seed=index + 1, grammar=asked[index].grammar) for index in indices
            ]
            found = llm.generate([prompt(index) for index in indices], params)
            return {index: each.text for index, each in zip(indices, found, strict=True)}

        for turn in range(1, max(len(each.turns) for each in asked)):
            several = [index for index, each in enumerate(asked) if len(each.turns) > turn]
            for index, text in answers(several).items():
                spoken[index] += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": asked[index].turns[turn]},
                ]
        plain = answers([index for index, each in enumerate(asked) if each.is_predicted])
        predictions = {
            index: edited(text, list(plain.values()), index) for index, text in plain.items()
        }
        return [
            Prompt(
                each, prompt(index), index + 1, predictions.get(index, ""),
                tuple(tokenizer.encode(predictions.get(index, ""))),
            )
            for index, each in enumerate(asked)
        ]  # fmt: skip


def measure(
    config: Config, names: Sequence[str], prompts: Sequence[Prompt], law: SamplingParams
) -> dict[str, Figures]:
    """Measure new drafters on all prompts, in their order, one at a time; by category."""
    stages = [stage for name in names for stage in config.drafters[name].stages]
    drafters = {
        name: replace(config.drafters[name], placement=DrafterPlacement(host="target"))
        for name in (*names, *stages)
    }
    found: dict[str, Figures] = {}
    with LLM(replace(config, drafters=drafters, tasks={})) as llm:
        bar = tqdm(total=len(prompts), desc="+".join(names), file=sys.stderr)
        for category, group in groupby(prompts, key=lambda each: each.ask.category):
            before = llm.metrics()
            stats = []
            for prompt in group:
                asked = replace(
                    law, seed=prompt.seed, prediction=prompt.predicted_ids,
                    grammar=prompt.ask.grammar,
                )  # fmt: skip
                (answer,) = llm.generate([prompt.token_ids], asked, task=category)
                stats.append((len(answer.token_ids), answer.stats))
                bar.update()
            found[category] = figures_of(stats, before, llm.metrics(), category)
        bar.close()
    return found


def figures_of(
    answers: Sequence[tuple[int, SpeculationStats]], before: str, after: str, task: str
) -> Figures:
    """The figures of some answers, each with its tokens.

    before, after: the metrics when the first one began and when the last one was over."""
    num_steps = sum(each.num_steps for _, each in answers)
    num_spec = sum(each.num_spec_steps for _, each in answers)
    num_accepted = sum(each.num_accepted_draft_tokens for _, each in answers)
    drafted_s = grown(before, after, "drafthouse_draft_seconds_total")
    step_s = grown(before, after, "drafthouse_target_step_seconds_sum")
    errors = calibration_errors(after, task)
    return Figures(
        sum(count for count, _ in answers) / max(num_steps, 1),
        1.0 + num_accepted / num_spec if num_spec else None,
        1000 * drafted_s / num_steps if num_steps else None,
        1000 * step_s / num_steps if num_steps else None,
        drafted_s / (drafted_s + step_s) if step_s else None,
        mean(errors) if errors else None,
    )


def calibration_errors(metrics: str, task: str) -> list[float]:
    """Return the calibration error of each drafter that had drafts verified on a task."""
    lines = re.findall(
        r"^drafthouse_survival_calibration_error\{([^}]*)\} (\S+)$", metrics, re.MULTILINE
    )
    return [float(value) for labels, value in lines if f'task="{task}"' in labels]


def grown(before: str, after: str, name: str) -> float:
    """Return the growth of a counter between two readings of the metrics."""
    return _total(after, name) - _total(before, name)


def _total(metrics: str, name: str) -> float:
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, values))


def averaged(by_category: dict[str, Figures]) -> Figures:
    """Return the mean over the categories, each with the same weight."""

    def over(name: str) -> float | None:
        values = [getattr(each, name) for each in by_category.values()]
        known = [value for value in values if value is not None]
        return mean(known) if known else None

    return Figures(
        over("tokens_per_step") or 0.0, over("acceptance_len"), over("draft_ms"), over("step_ms"),
        over("draft_share"), over("calibration_error"),
    )  # fmt: skip


# Columns of the tables: a figure, its heading and its format.
_TABLES = (
    ("tokens_per_step", "Tokens per step", "{:.2f}"),
    ("acceptance_len", "Mean acceptance length", "{:.2f}"),
    ("draft_ms", "Drafting, ms per step", "{:.1f}"),
    ("step_ms", "The target, ms per step", "{:.1f}"),
    ("draft_share", "Drafting, share of the time", "{:.0%}"),
    ("calibration_error", "Calibration error of the survivals", "{:.3f}"),
)


def markdown(report: dict[str, dict[str, dict[str, Figures]]]) -> str:
    """Tables of drafters by categories, for each law and figure.  report: law -> drafters ->
    category."""
    parts = ["## Tokens per step, mean over the categories\n"]
    drafters = list(dict.fromkeys(name for rows in report.values() for name in rows))
    parts += head(["law", *drafters])
    for law, rows in report.items():
        means = {name: averaged(figures).tokens_per_step for name, figures in rows.items()}
        parts.append(row([law, *(number(means.get(name), 2) for name in drafters)]))
    parts.append("")
    for law, rows in report.items():
        for name, title, form in _TABLES:
            categories = list(next(iter(rows.values())))
            parts.append(f"## {title}, {law}\n")
            parts += head(["drafter", *categories, "mean"])
            for each_name, figures in rows.items():
                held = [*figures.values(), averaged(figures)]
                values = [getattr(each, name) for each in held]
                cells = ["-" if value is None else form.format(value) for value in values]
                parts.append(row([each_name, *cells]))
            parts.append("")
    return "\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("questions", type=Path)
    add("--config", type=Path, required=True)
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    add("--drafters", nargs="+", required=True, help="a+b: merged in one tree")
    add("--per-task", type=int, default=3, help="questions of each category")
    add("--max-tokens", type=int, default=128)
    add("--nodes", type=int, default=8, help="verified per step")
    add("--laws", nargs="+", default=["greedy"], help="greedy, t0.7, t0.7,p0.9,k50 ...")
    add("--categories", nargs="+", help="default: all")
    add("--fresh", action="store_true", help="forget what was measured before")
    add("--out", type=Path, default=OUT / "drafting" / "steps.json")
    add("--markdown", type=Path, help="write the tables there, too")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.overrides).config
    fixed = replace(config.coordinator, budget="fixed", max_draft_tokens=arguments.nodes)
    config = replace(config, coordinator=fixed)
    asked = [
        each
        for each in asks(arguments.questions, arguments.per_task)
        if not arguments.categories or each.category in arguments.categories
    ]
    if not asked:
        parser.error(f"--categories: no questions of {', '.join(arguments.categories or ['any'])}")
    settings: dict[str, Any] = {
        "target": config.target.engine.model, "questions of each category": arguments.per_task,
        "max_tokens": arguments.max_tokens, "nodes": arguments.nodes,
    }  # fmt: skip
    try:
        laws = {name: sampling(name, arguments.max_tokens) for name in arguments.laws}
        record = Record(arguments.out, settings, fresh=arguments.fresh)
    except ValueError as error:
        parser.error(str(error))
    for name, law in laws.items():
        missing = [each for each in arguments.drafters if f"{name}/{each}" not in record.results]
        prompts = prepare(config, asked, law) if missing else []
        for drafters in missing:
            found = measure(config, drafters.split("+"), prompts, law)
            plain = {category: asdict(each) for category, each in found.items()}
            record.add(f"{name}/{drafters}", plain)
    report: dict[str, dict[str, dict[str, Figures]]] = {}
    for key, categories in record.results.items():
        name, drafters = key.split("/")
        figures = {category: Figures(**each) for category, each in categories.items()}
        report.setdefault(name, {})[drafters] = figures
    print(json.dumps(record.publish(record.results), indent=2))
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
