"""Measures the calibration of the drafters' survivals, on prompts outside all training data.

    python -m benchmarks.drafting.calibration

The budget is fixed, so that the verified nodes do not depend on this machine's speed, and the
target is the small one, because its grown versions compute the same function.  Each drafter drafts
alone, on the tasks that the configuration gives it.  The error is the product's own metric: mean
|predicted - accepted| over ten bins.  Predictions are made before the outcome is known, and the
first ones are included.

Bar: at most 0.05 per drafter, over all of its tasks weighted by nodes.  Exit status 1 if missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.answers import Law
from benchmarks.support.by_hand import Ours, Setup
from benchmarks.support.options import add_hand_options, parser_of
from benchmarks.support.prompts import KINDS, prompts
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.config.schema import Config

_MAX_ERROR = 0.05


def kinds_of(config: Config, drafter: str) -> list[str]:
    """The kinds of prompts whose tasks the drafter serves."""
    return [kind for kind, (task, _) in KINDS.items() if drafter in config.drafters_of(task)]


def errors_of(text: str, drafter: str) -> dict[str, tuple[float, float]]:
    """By task: the calibration error and the number of verified draft tokens."""
    errors: dict[str, float] = {}
    nodes: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("drafter") != drafter:
                continue
            if sample.name == "drafthouse_survival_calibration_error":
                errors[sample.labels["task"]] = sample.value
            elif sample.name == "drafthouse_draft_tokens_total":
                nodes[sample.labels["task"]] = sample.value
    return {task: (error, nodes.get(task, 0.0)) for task, error in errors.items()}


def summary(by_task: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The totals of one drafter under one sampling setting."""
    total = sum(nodes for _, nodes in by_task.values())
    mean = sum(error * nodes for error, nodes in by_task.values()) / total if total else None
    return {
        "error": None if mean is None else round(mean, 4),
        "nodes": total,
        "by task": {task: round(error, 4) for task, (error, _) in sorted(by_task.items())},
    }


def measure(arguments: argparse.Namespace, drafter: str, law: Law) -> dict[str, Any]:
    """Measure one drafter, in separate processes."""
    from transformers import AutoTokenizer

    overrides = (
        f"target.engine.model={arguments.target}", "coordinator.budget=fixed",
        f"coordinator.max_draft_tokens={arguments.nodes}", *arguments.overrides,
    )  # fmt: skip
    kinds = kinds_of(load(arguments.config, overrides).config, drafter)
    if not kinds:
        return summary({})
    asked = prompts(arguments.prompts, AutoTokenizer.from_pretrained(arguments.target), kinds)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as logs:
        ours = Ours(Setup(arguments.config, overrides, (drafter,), cores, Path(logs)))
        try:
            ours.start()
            ours.run(asked, arguments.max_tokens, law, arguments.concurrency, seed=1)
            return summary(errors_of(ours.metrics(), drafter))
        finally:
            ours.stop()


def missed(report: dict[str, dict[str, Any]]) -> list[str]:
    """Messages for the bars that are missed."""
    return [
        f"{drafter}, {law}: {figures['error']} of {figures['nodes']:.0f} nodes, bar {_MAX_ERROR}"
        for drafter, laws in report.items()
        for law, figures in laws.items()
        if figures["error"] is None or figures["error"] > _MAX_ERROR
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_hand_options(parser)
    add = parser.add_argument
    add("--drafters", type=words, help="default: all of the configuration")
    add("--prompts", type=int, default=120)
    add("--max-tokens", type=int, default=128)
    add("--concurrency", type=int, default=4)
    add("--nodes", type=int, default=8, help="per sequence and step")
    arguments = parser.parse_args(words)
    names = arguments.drafters or list(load(arguments.config, arguments.overrides).config.drafters)
    report = {
        name: {law.name: measure(arguments, name, law) for law in arguments.laws} for name in names
    }
    show_report(OUT / "drafting/calibration.json", report)
    for line in missed(report):
        print(f"missed: {line}", file=sys.stderr)
    sys.exit(bool(missed(report)))


if __name__ == "__main__":
    main()
