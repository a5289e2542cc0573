"""Compares the laws by which drafts are accepted: tokens per step, and what a step costs.

    python -m benchmarks.drafting.laws QUESTIONS --config configs/local.yaml --drafter lm \\
        --nodes 1 2 4 8 --temperature 0.7 --markdown laws.md

QUESTIONS: Spec-Bench's JSONL.  The target answers the same questions under each law with one
drafter inside it, one question at a time.  A step verifies a fixed number of nodes, so tokens per
step do not depend on the machine's speed; the times do.  Under each law but coupled a text depends
on its drafts, so the laws are compared over different texts of the same law: the interval is that
of the mean over questions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import stdev

from tqdm import tqdm

from benchmarks.drafting.steps import Prompt, grown, prepare
from benchmarks.drafting.texts import KINDS, asks
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.config.schema import Config, DrafterPlacement
from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM, Completion
from cluster.requests.acceptance_law import LAWS, Law


@dataclass(frozen=True, slots=True)
class Cell:
    """One law with one number of nodes.

    tokens_per_step: over all steps.  error: of its mean over questions.  step_ms, draft_ms: of the
    target's steps and of the drafting after each.
    """

    tokens_per_step: float
    error: float
    step_ms: float
    draft_ms: float


@dataclass(slots=True)
class _Sums:
    """Of the answers under one law.  own: tokens per step, by question."""

    tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    draft_s: float = 0.0
    own: list[float] = field(default_factory=list)

    def cell(self) -> Cell:
        return Cell(
            self.tokens / self.steps,
            stdev(self.own) / sqrt(len(self.own)),
            1000 * self.step_s / self.steps,
            1000 * self.draft_s / self.steps,
        )


def measure(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, nodes: int
) -> dict[Law, Cell]:
    """Answer each prompt under every law, in an order that moves on with each: so no law
    has the first seconds, or a slower quarter of an hour, to itself."""
    _answer(llm, prompts[0], params, SpeculationOptions(max_draft_tokens=nodes))
    sums: dict[Law, _Sums] = {law: _Sums() for law in LAWS}
    for index, prompt in enumerate(tqdm(prompts, desc=f"{nodes} nodes", file=sys.stderr)):
        first = index % len(LAWS)
        for law in LAWS[first:] + LAWS[:first]:
            before, one = llm.metrics(), sums[law]
            options = SpeculationOptions(law=law, max_draft_tokens=nodes)
            answer = _answer(llm, prompt, params, options)
            after, num_steps = llm.metrics(), answer.stats.num_steps
            one.tokens += len(answer.token_ids)
            one.steps += num_steps
            one.own += [len(answer.token_ids) / num_steps] if num_steps else []
            one.step_s += grown(before, after, "drafthouse_target_step_seconds_sum")
            one.draft_s += grown(before, after, "drafthouse_draft_seconds_total")
    return {law: one.cell() for law, one in sums.items()}


def _answer(
    llm: LLM, prompt: Prompt, params: SamplingParams, options: SpeculationOptions
) -> Completion:
    asked = replace(params, seed=prompt.seed)
    (answer,) = llm.generate(
        [prompt.token_ids], asked, task=prompt.ask.category, speculation=options
    )
    return answer


def config_for(config: Config, drafter: str, nodes: int) -> Config:
    """One drafter inside the target, and a fixed number of nodes at most."""
    own = replace(config.drafters[drafter], placement=DrafterPlacement(host="target"))
    coordinator = replace(config.coordinator, budget="fixed", max_draft_tokens=nodes, laws=LAWS)
    return replace(config, drafters={drafter: own}, tasks={}, coordinator=coordinator)


def markdown(report: dict[int, dict[Law, Cell]]) -> str:
    """Tables of nodes by laws."""
    parts: list[str] = []
    for title, form in (
        ("Tokens per step", lambda each: f"{each.tokens_per_step:.3f} ± {each.error:.3f}"),
        ("A step, ms", lambda each: f"{each.step_ms:.2f}"),
        ("Drafting after it, ms", lambda each: f"{each.draft_ms:.2f}"),
    ):
        parts.append(f"## {title}\n\n| nodes | {' | '.join(LAWS)} |\n|---|{'---|' * len(LAWS)}")
        for nodes, cells in report.items():
            parts.append(f"| {nodes} | {' | '.join(form(cells[law]) for law in LAWS)} |")
        parts.append("")
    return "\n".join(parts)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.drafting.laws",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--drafter", default="lm")
    parser.add_argument("--per-task", type=int, default=3, help="questions of each category")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--out", type=Path, default=OUT / "drafting" / "laws.json")
    parser.add_argument("--markdown", type=Path, help="write the tables there, too")
    arguments = parser.parse_args(words)
    config = load(arguments.config, arguments.overrides).config
    law = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    asked = [each for each in asks(arguments.questions, arguments.per_task)
             if each.category not in KINDS]  # fmt: skip
    prompts = prepare(config, asked, law)
    report: dict[int, dict[Law, Cell]] = {}
    with LLM(config_for(config, arguments.drafter, max(arguments.nodes))) as llm:
        for nodes in arguments.nodes:
            report[nodes] = measure(llm, prompts, law, nodes)
    settings = {
        "target": config.target.engine.model, "drafter": arguments.drafter,
        "questions": f"{len(prompts)}, {arguments.per_task} of each category",
        "max_tokens": arguments.max_tokens, "temperature": arguments.temperature,
    }  # fmt: skip
    if arguments.markdown is not None:
        arguments.markdown.write_text(markdown(report), encoding="utf-8")
    shown = {
        str(nodes): {each: asdict(cell) for each, cell in cells.items()}
        for nodes, cells in report.items()
    }
    show_report(arguments.out, {"settings": settings, "nodes": shown})
    return 0


if __name__ == "__main__":
    sys.exit(main())
