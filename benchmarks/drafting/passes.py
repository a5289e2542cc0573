"""Counts a draft model's passes per step, alone and behind a look-up in a cascade.

    python -m benchmarks.drafting.passes QUESTIONS --config configs/local.yaml

QUESTIONS: as for `benchmarks.drafting.steps`.  The target answers; then drafters are led along the
answers as residents would draft, in rounds without a time limit, with the model's passes as single
steps of its engine.  Tokens per step here are of one drafter; `benchmarks.drafting.steps` compares
a cascade with the merge of its stages.

Bar: passes per step of each cascade at most 0.7 of the model's own.  Exit status 1 if missed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from benchmarks.drafting.steps import prepare
from benchmarks.drafting.texts import Ask, asks
from benchmarks.replay.along import Recording, ReplayStats, replay
from benchmarks.support.options import parser_of
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.core import SamplingParams, token_array
from cluster.draft import registry
from cluster.draft.base import Drafter, DrafterContext
from cluster.draft.cascade import CascadeDrafter
from cluster.draft.cascade_options import CascadeOptions
from cluster.draft.lm import LMDrafter
from cluster.draft.lm_options import LMOptions
from cluster.engine.engine import Engine
from cluster.engine.work import Output
from cluster.local import LLM

_MAX_SHARE = 0.7
_MODEL, _LOOK_UP = "lm", "suffix"


class CountedEngine:
    """An engine whose passes are steps that it counts."""

    grower = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Output]:
        self.num_passes += 1
        return self._engine.step()


@dataclass(frozen=True, slots=True)
class Counted:
    """The figures of one drafter on one category."""

    passes_per_step: float
    tokens_per_step: float


def recordings(config: Config, asked: Sequence[Ask], law: SamplingParams) -> list[Recording]:
    """The target's answers, each with its category as its task."""
    prompts = prepare(config, asked, law)
    with LLM(replace(config, drafters={}, tasks={})) as llm:
        params = [replace(law, seed=each.seed, grammar=each.ask.grammar) for each in prompts]
        answers = llm.generate([each.token_ids for each in prompts], params)
    return [
        Recording(
            token_array(prompt.token_ids), token_array(answer.token_ids),
            replace(own, grammar=None), prompt.ask.category,
        )
        for prompt, own, answer in zip(prompts, params, answers, strict=True)
    ]  # fmt: skip


def count(
    drafter: Drafter, engine: CountedEngine, texts: Sequence[Recording], nodes: int
) -> dict[str, Counted]:
    """Lead the drafter along all texts; its figures by category."""
    stats: dict[str, ReplayStats] = {}
    passes: dict[str, int] = {}
    for index, text in enumerate(texts):
        before = engine.num_passes
        found = replay(drafter, text, nodes, request_id=str(index))
        stats[text.task] = stats.get(text.task, ReplayStats()) + found
        passes[text.task] = passes.get(text.task, 0) + engine.num_passes - before
    return {
        task: Counted(passes[task] / each.num_rounds, each.mean_acceptance_length)
        for task, each in stats.items()
    }


def drafters_of(
    config: Config, thresholds: Sequence[float], nodes: int, engine: CountedEngine
) -> Mapping[str, Drafter]:
    """The model alone, and a cascade for each threshold of the look-up before it."""
    options: LMOptions = registry.check(_MODEL, config.drafters[_MODEL])

    def context(name: str, stages: Mapping[str, Drafter]) -> DrafterContext:
        # Whatever it is: a drafter with a target drafts as a resident.
        return DrafterContext(name, nodes, 1, target=engine, stages=stages)

    def model() -> LMDrafter:
        return LMDrafter(context(_MODEL, {}), options, cast(Engine, engine))

    def cascade(threshold: float) -> CascadeDrafter:
        look_up = registry.create(_LOOK_UP, config.drafters[_LOOK_UP], context(_LOOK_UP, {}))
        named = {_LOOK_UP: look_up, _MODEL: model()}
        return CascadeDrafter(context("cascade", named), CascadeOptions(tuple(named), (threshold,)))

    cascades = {f"cascade at {each:g}": cascade(each) for each in thresholds}
    return {_MODEL: model(), **cascades}


def missed(report: Mapping[str, Mapping[str, Counted]]) -> list[str]:
    """One line for each bar that is missed."""
    lines = []
    for name, by_task in report.items():
        for task, each in by_task.items():
            share = each.passes_per_step / report[_MODEL][task].passes_per_step
            if name != _MODEL and share > _MAX_SHARE:
                lines.append(f"{name}, {task}: {share:.2f} of the model's passes, bar {_MAX_SHARE}")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("questions", type=Path)
    add("--config", type=Path, required=True)
    add("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    add("--categories", nargs="+", default=["code", "agent turns"])
    add("--thresholds", type=float, nargs="+", default=[0.3, 0.5, 0.7, 1.0])
    add("--per-task", type=int, default=6, help="questions of each category")
    add("--max-tokens", type=int, default=96)
    add("--nodes", type=int, default=8, help="of each tree")
    add("--temperature", type=float, default=0.0)
    add("--out", type=Path, default=OUT / "drafting" / "passes.json")
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.overrides).config
    asked = [
        each
        for each in asks(arguments.questions, arguments.per_task)
        if each.category in arguments.categories
    ]
    law = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    texts = recordings(config, asked, law)
    options: LMOptions = registry.check(_MODEL, config.drafters[_MODEL])
    engine = CountedEngine(Engine.load(options.engine))
    nodes = arguments.nodes
    report = {
        name: count(drafter, engine, texts, nodes)
        for name, drafter in drafters_of(config, arguments.thresholds, nodes, engine).items()
    }
    settings = {
        "target": config.target.engine.model, "questions of each category": arguments.per_task,
        "max_tokens": arguments.max_tokens, "nodes": nodes, "temperature": arguments.temperature,
    }  # fmt: skip
    figures = {
        name: {
            task: {
                "passes per step": round(each.passes_per_step, 3),
                "tokens per step": round(each.tokens_per_step, 3),
            }
            for task, each in by_task.items()
        }
        for name, by_task in report.items()
    }
    show_report(arguments.out, {"settings": settings, "drafters": figures})
    for line in missed(report):
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(missed(report)))


if __name__ == "__main__":
    sys.exit(main())
