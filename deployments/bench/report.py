"""What a bench found: Markdown for people, JSON by the names of vLLM's bench, a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.records import frozen
from cluster.spec.interval import Interval
from deployments.bench.load import Level, TimedAnswer, equal_texts, ratios
from deployments.metrics_reader import SpeculationCounts
from deployments.report import rendered


@frozen
class Run:
    """All rounds of one side at one load."""

    level: Level
    side: str
    answers: Sequence[TimedAnswer]
    figures: Mapping[str, float]
    speculation: SpeculationCounts | None

    @property
    def names(self) -> list[str]:
        return [str(self.level), *([self.side] if self.side else [])]


@frozen
class Compared:
    """The two sides of a load.  ratios: of their figures.  equal_texts: how many, of how many."""

    first: Run
    second: Run
    ratios: Mapping[str, Interval]
    equal_texts: tuple[int, int]


@frozen
class Report:
    """All that was asked, and all runs; fields: of every request of the first side."""

    url: str
    fields: Mapping[str, Any]
    num_prompts: int
    rounds: int
    goodput: Mapping[str, float]
    runs: list[Run] = field(default_factory=list)

    def compared(self) -> Iterator[Compared]:
        """Yield what each load says of its two sides, where two are compared."""
        if self.runs[0].side:
            for first, second in zip(self.runs[::2], self.runs[1::2], strict=True):
                answers = first.answers, second.answers
                yield Compared(first, second, ratios(*answers), equal_texts(*answers))


def markdown(report: Report) -> str:
    """The tables that the command prints."""
    return rendered("bench", {"report": report, "compared": [*report.compared()]})


def write_json(report: Report, path: Path) -> None:
    """Write every figure; those of a run have the names of `vllm bench serve`."""
    document = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "url": report.url,
        "request": dict(report.fields),
        "num_prompts": report.num_prompts,
        "rounds": report.rounds,
        "goodput": dict(report.goodput),
        "runs": [
            {
                "load": asdict(run.level),
                "side": run.side,
                **run.figures,
                "speculation": run.speculation and asdict(run.speculation),
            }
            for run in report.runs
        ],
        "ratios": [
            {
                "load": str(each.first.level),
                "of": each.first.side,
                "to": each.second.side,
                **{
                    name: {"value": ratio.mean, "low": ratio.low, "high": ratio.high}
                    for name, ratio in each.ratios.items()
                },
                "equal_texts": each.equal_texts[0],
            }
            for each in report.compared()
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


def write_picture(report: Report, path: Path) -> None:
    """Draw throughput and latencies by load; raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib: pip install 'drafthouse[bench]'; the figures are above"
        ) from error
    figure = Figure(figsize=(12, 4), layout="constrained")
    shown = {
        "output tokens/s": "output_throughput",
        "TTFT, median, ms": "median_ttft_ms",
        "TPOT, median, ms": "median_tpot_ms",
    }
    sides = list(dict.fromkeys(run.side for run in report.runs))
    for axes, (title, name) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for place, side in enumerate(sides):
            runs = [run for run in report.runs if run.side == side]
            values = [run.figures.get(name, 0.0) for run in runs]
            width = 0.8 / len(sides)
            at = [index + place * width for index in range(len(runs))]
            axes.bar(at, values, width, label=side or None)
        axes.set_xticks(range(len(runs)), [str(run.level) for run in runs])
        axes.set_title(title)
    if len(sides) > 1:
        axes.legend()
    figure.savefig(path)
