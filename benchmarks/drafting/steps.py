"""Measures tokens per step of drafters inside the target, each alone, on real questions.

    python -m benchmarks.drafting.steps QUESTIONS --config configs/local.yaml --drafters lm suffix

QUESTIONS: Spec-Bench's JSONL.  The target answers some questions of each task with each drafter; a
step verifies a fixed number of nodes, so that nothing depends on the machine's speed but the last
column: what drafting takes, as a share of the time of drafting and steps together.  A drafter that
the configuration does not have is given by `--set drafters.NAME.kind=KIND`.

A `prediction` gets what the target answers without drafts, a tenth of its lines exchanged for lines
of other answers.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.spec_bench import questions as spec_bench
from benchmarks.support.record import OUT, show_report
from cluster.config import Config, DrafterPlacement
from cluster.config_file import load
from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM

_EDITED_SHARE = 0.1


def edited(text: str, others: Sequence[str], seed: int) -> str:
    """The text with a tenth of its lines, one at least, from other texts."""
    lines, draw = text.splitlines(keepends=True), random.Random(seed)
    pool = [line for other in others for line in other.splitlines(keepends=True) if line.strip()]
    for index in draw.sample(range(len(lines)), max(round(_EDITED_SHARE * len(lines)), 1)):
        lines[index] = draw.choice(pool)
    return "".join(lines)


def measure(
    config: Config, name: str, chosen: Sequence[spec_bench.Question], law: SamplingParams,
) -> dict[str, Any]:  # fmt: skip
    """One new drafter over all questions, in their order, one at a time."""
    drafter = replace(config.drafters[name], placement=DrafterPlacement(host="target"))
    alone = replace(config, drafters={name: drafter}, tasks={})
    emitted: dict[str, int] = {}
    steps: dict[str, int] = {}
    drafted_s = step_s = 0.0
    with LLM(alone) as llm:
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise SystemExit(f"{config.target.engine.model} has no tokenizer; name a chat model")
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": each.turns[0]}])
            for each in chosen
        ]
        predictions: list[tuple[int, ...]] = [()] * len(prompts)
        if drafter.kind == "prediction":
            off = SpeculationOptions(enabled=False)
            plain = [each.text for each in llm.generate(list(prompts), law, speculation=off)]
            predictions = [
                tuple(tokenizer.encode(edited(text, plain, index)))
                for index, text in enumerate(plain)
            ]
        for question, prompt, predicted in zip(
            tqdm(chosen, desc=name, file=sys.stderr), prompts, predictions, strict=True
        ):
            (answer,) = llm.generate([prompt], replace(law, prediction=predicted))
            task = question.category
            emitted[task] = emitted.get(task, 0) + len(answer.token_ids)
            steps[task] = steps.get(task, 0) + answer.stats.num_steps
        metrics = llm.metrics()
    drafted_s = _total(metrics, "drafthouse_draft_seconds_total")
    step_s = _total(metrics, "drafthouse_target_step_seconds_sum")
    by_task = {task: round(emitted[task] / max(steps[task], 1), 3) for task in emitted}
    return {
        "tokens per step": round(sum(by_task.values()) / len(by_task), 3),
        "tokens per step by task": by_task,
        "share of time": round(drafted_s / (drafted_s + step_s), 3) if step_s else None,
    }


def _total(metrics: str, name: str) -> float:
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, values))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.drafting.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--drafters", nargs="+", required=True)
    parser.add_argument("--per-task", type=int, default=3, help="questions of each task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=8, help="verified per step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=OUT / "drafting" / "steps.json")
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.overrides).config
    fixed = replace(config.coordinator, budget="fixed", max_draft_tokens=arguments.nodes)
    config = replace(config, coordinator=fixed)
    law = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens, seed=1)
    chosen = spec_bench.limit(spec_bench.load(arguments.questions), arguments.per_task)
    report = {name: measure(config, name, chosen, law) for name in arguments.drafters}
    settings = {
        "target": config.target.engine.model,
        "questions": f"{len(chosen)}, {arguments.per_task} of each task",
        "max_tokens": arguments.max_tokens,
        "nodes": arguments.nodes,
        "temperature": arguments.temperature,
    }
    show_report(arguments.out, {"settings": settings, "drafters": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
