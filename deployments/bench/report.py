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
from deployments.bench.answers import TimedAnswer
from deployments.bench.load import Level
from deployments.bench.ratios import equal_texts, ratios, told
from deployments.metrics_reader import SpeculationCounts

_TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "e2e"}
_SHARES = ("mean", "median", "p95", "p99")
# A client that sends later than this has measured itself too.
_LATE_S = 0.01


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
class Report:
    """All that was asked, and all runs; fields: of every request of the first side."""

    url: str
    fields: Mapping[str, Any]
    num_prompts: int
    rounds: int
    goodput: Mapping[str, float]
    runs: list[Run] = field(default_factory=list)

    def pairs(self) -> Iterator[tuple[Run, Run]]:
        """The two sides of each load, where two are compared."""
        if self.runs and self.runs[0].side:
            yield from zip(self.runs[::2], self.runs[1::2], strict=True)


def markdown(report: Report) -> str:
    """The tables that the command prints."""
    law = report.fields["temperature"]
    parts = [
        f"{report.fields['model']} at {report.url}: {report.num_prompts} prompts, "
        f"{report.rounds} round{'s' * (report.rounds > 1)}, at most "
        f"{report.fields['max_tokens']} tokens each, "
        f"{f'temperature {law:g}' if law else 'greedy'}.",
        _throughput(report),
        table(
            [*_sides(report), "ms", *_SHARES],
            [
                [
                    *run.names,
                    title,
                    *(_shown(run.figures.get(f"{share}_{name}_ms")) for share in _SHARES),
                ]
                for run in report.runs
                for name, title in _TIMES.items()
            ],
        ),
    ]
    if pairs := list(report.pairs()):
        parts.append(_ratios(pairs))
    late_s = max((each.late_s for run in report.runs for each in run.answers), default=0.0)
    if late_s > _LATE_S:
        parts.append(f"This client sent requests up to {1e3 * late_s:.0f} ms late: it is busy too.")
    for run in report.runs:
        errors = [answer.error for answer in run.answers if answer.error]
        if errors:
            parts.append(f"{', '.join(run.names)}: {len(errors)} failed, the first: {errors[0]}")
    return "\n\n".join(parts)


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
                "load": {"concurrency": run.level.concurrency, "rate": run.level.rate},
                "side": run.side,
                **run.figures,
                "speculation": _speculation(run.speculation),
            }
            for run in report.runs
        ],
        "ratios": [
            {
                "load": str(first.level),
                "of": first.side,
                "to": second.side,
                **{
                    name: {"value": ratio.mean, "low": ratio.low, "high": ratio.high}
                    for name, ratio in ratios(first.answers, second.answers).items()
                },
                "equal_texts": equal_texts(first.answers, second.answers)[0],
            }
            for first, second in report.pairs()
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


def _throughput(report: Report) -> str:
    head = [*_sides(report), "requests", "failed", "requests/s", "output tokens/s", "all tokens/s"]
    if report.goodput:
        head.append("good requests/s")
    head += ["drafts accepted", "tokens per step"]
    rows = []
    for run in report.runs:
        found, drafts = run.figures, run.speculation
        row = [*run.names, f"{found['completed']:.0f}", f"{found['failed']:.0f}"]
        names = ["request_throughput", "output_throughput", "total_token_throughput"]
        row += [_shown(found[name]) for name in names]
        if report.goodput:
            row.append(_shown(found["request_goodput"]))
        row += [f"{drafts.acceptance_rate:.0%}" if drafts else "-"]
        row += [f"{drafts.mean_acceptance_length:.2f}" if drafts else "-"]
        rows.append(row)
    return table(head, rows)


def _ratios(pairs: Sequence[tuple[Run, Run]]) -> str:
    found = [ratios(first.answers, second.answers) for first, second in pairs]
    names = list(dict.fromkeys(name for each in found for name in each))
    rows = []
    for (first, second), each in zip(pairs, found, strict=True):
        equal, of = equal_texts(first.answers, second.answers)
        shown = [told(each[name]) if name in each else "-" for name in names]
        rows.append([str(first.level), *shown, f"{equal} of {of}"])
    first, second = pairs[0]
    head = ["load", *names, "equal texts"]
    about = f"{first.side} over {second.side}, with 95 % intervals:"
    return f"{about}\n\n{table(head, rows)}"


def _speculation(found: SpeculationCounts | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        **asdict(found),
        "acceptance_rate": found.acceptance_rate,
        "mean_acceptance_length": found.mean_acceptance_length,
    }


def _sides(report: Report) -> list[str]:
    return ["load", "side"] if report.runs[0].side else ["load"]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
