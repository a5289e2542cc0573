"""Measures whether verification hides drafting if the drafters have their own device.

    python -m benchmarks.rounds.overlap

The target is pinned to the first core, with one thread; coordinator, drafters and client share the
second.  One request at a time.  Reports the medians over the runs:

  period over step      time between two steps, over the time of one: 1 if everything else is hidden
  drafting over step    compute time of a drafter per commit that asks for drafts, over the step
  pre-drafted           share of commits after which the drafter's former tree was continued
  tokens/s              decoding rate: the effect of a broader tree

Bars: period over step at most 1.03, and pre-drafted at least 0.8 (greedy) or 0.7 (T = 0.8) on code.
Exit status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.answers import Law, rate_at_level
from benchmarks.support.by_hand import Ours, Setup
from benchmarks.support.options import add_hand_options, parser_of, words
from benchmarks.support.prompts import Prompt, prompts
from benchmarks.support.record import OUT, show_report

_MAX_PERIOD = 1.03
_MIN_PRE_DRAFTED = {"greedy": 0.8, "t0.8": 0.7}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series_of(text: str) -> Series:
    """Counters in Prometheus' text format, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.type == "counter"
        for sample in family.samples
    }


def gained(before: Series, after: Series, name: str, **labels: str) -> float:
    """The total increase of the series with that name and those labels."""
    return sum(
        value - before.get(key, 0.0)
        for key, value in after.items()
        if key[0] == f"{name}_total" and set(labels.items()) <= key[1]
    )


def shares(
    rounds: Sequence[Mapping[str, float]], before: Series, after: Series, drafters: Sequence[str]
) -> dict[str, Any]:
    """The figures of one run.  rounds: of `StepLog.recent_steps`.  before, after: metrics."""
    step_s = statistics.median(each["step_time_s"] for each in rounds)
    report: dict[str, Any] = {
        "rounds": len(rounds),
        "step, median, ms": 1e3 * step_s,
        "nodes per round, mean": statistics.mean(each["num_nodes"] for each in rounds),
        "period over step": statistics.median(
            each["period_s"] / each["step_time_s"] for each in rounds
        ),
    }
    for name in drafters:
        asked = gained(before, after, "drafthouse_drafter_commits", drafter=name)
        hits, misses = (
            gained(before, after, "drafthouse_pre_drafted_steps", drafter=name, outcome=outcome)
            for outcome in ("hit", "miss")
        )
        computed_s = gained(before, after, "drafthouse_draft_seconds", drafter=name)
        if not asked or not hits + misses:
            continue
        report[f"{name}: drafting over step"] = computed_s / asked / step_s
        report[f"{name}: pre-drafted"] = hits / (hits + misses)
    return report


def middle(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the runs that have it."""
    names = {name: None for run in runs for name in run}
    return {
        name: round(statistics.median(run[name] for run in runs if name in run), 4)
        for name in names
    }


def missed(law: str, figures: Mapping[str, float], drafter: str) -> list[str]:
    """Messages for the bars that are missed."""
    checks = (
        ("period over step", figures["period over step"], _MAX_PERIOD, False),
        ("pre-drafted", figures.get(f"{drafter}: pre-drafted", 0.0),
         _MIN_PRE_DRAFTED.get(law, 0.0), True),
    )  # fmt: skip
    return [
        f"{law}: {name} is {value:.3f}, the bar {bar}"
        for name, value, bar, is_least in checks
        if (value < bar if is_least else value > bar)
    ]


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Returns the report and the missed bars."""
    from transformers import AutoTokenizer

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError(f"{len(cores)} core; the target wants one and all others another")
    os.sched_setaffinity(0, cores[1:])
    overrides = (
        f"target.engine.model={arguments.target}", "target.engine.threads=1", *arguments.overrides
    )  # fmt: skip
    names = tuple(arguments.drafters)
    asked = prompts(
        arguments.prompts * (arguments.runs + 1),
        AutoTokenizer.from_pretrained(arguments.target), [arguments.kind],
    )  # fmt: skip
    report: dict[str, Any] = {}
    bars: list[str] = []
    with tempfile.TemporaryDirectory() as logs:
        ours = Ours(Setup(
            arguments.config, overrides, names, tuple(cores[1:]), Path(logs),
            target_cores=(cores[0],),
        ))  # fmt: skip
        try:
            ours.start()
            for law in arguments.laws:
                runs = _runs(ours, asked, arguments, law, names)
                report[law.name] = {**middle(runs), "runs": len(runs)}
                bars += missed(law.name, report[law.name], names[0])
        finally:
            ours.stop()
    return report, bars


def _runs(
    ours: Ours, asked: Sequence[Prompt], arguments: argparse.Namespace, law: Law,
    names: Sequence[str],
) -> list[dict[str, Any]]:  # fmt: skip
    """One run per group of prompts; the first is a warm-up."""
    found = []
    for number in range(arguments.runs + 1):
        group = asked[number * arguments.prompts : (number + 1) * arguments.prompts]
        before = series_of(ours.metrics())
        result = ours.run(group, arguments.max_tokens, law, 1, seed=number)
        after = series_of(ours.metrics())
        if number:
            num_rounds = int(gained(before, after, "drafthouse_target_steps"))
            recent = ours.status()["recent_steps"][-num_rounds:]
            speed = rate_at_level(result.answers, 1, from_submission=False)
            found.append({"tokens/s": speed, **shares(recent, before, after, names)})
    return found


def main() -> None:
    parser = parser_of(__doc__)
    add_hand_options(parser)
    parser.set_defaults(config="configs/pool.yaml")
    add = parser.add_argument
    add("--drafters", type=words, default=["lm"],
        help="the bars are about the first")  # fmt: skip
    add("--kind", default="code")
    add("--prompts", type=int, default=4, help="per run")
    add("--runs", type=int, default=5)
    add("--max-tokens", type=int, default=64)
    report, bars = measure(parser.parse_args())
    show_report(OUT / "rounds/overlap.json", report)
    for line in bars:
        print(f"missed: {line}", file=sys.stderr)
    sys.exit(bool(bars))


if __name__ == "__main__":
    main()
