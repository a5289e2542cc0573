"""The table and the picture of the answers to real questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import number
from benchmarks.spec_bench.plan import OURS
from benchmarks.spec_bench.summary import ALL

Record = Mapping[str, Any]


def markdown(document: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    settings, machine = document["settings"], document["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items())
    lines = [
        "# Real questions",
        "",
        f"`{document['command']}`, {document['date']}, {machine['cpu']}, {machine['cores']} cores, "
        f"client and servers on the same ones; {versions}.",
        "",
        f"{settings['questions']} questions, each asked once in the life of a server, so that no "
        "look-up and no cache has seen it; at most "
        f"{settings['max_tokens']} tokens per answer. Every server is asked over HTTP by the same "
        "client. *tokens/s*: while so many answers are under way, prefills included. *Ratio*: "
        "decoded tokens by decode seconds of the streams, the same questions on both sides, with "
        "95 % bootstrap intervals over questions. *Acceptance length*: tokens per step that "
        "verified drafts.",
    ]
    for law in settings["laws"]:
        for level in settings["concurrency"]:
            chosen = [
                record
                for record in document["summary"]
                if (record["law"], record["concurrency"]) == (law, level)
            ]
            if chosen:
                lines += ["", f"## {law}, {level} at a time", "", *_systems(chosen)]
                lines += ["", *_tasks(chosen)]
    if document["failures"]:
        lines += ["", "## Not measured", ""]
        lines += [f"- {name}: {reason}" for name, reason in document["failures"].items()]
    return "\n".join(lines) + "\n"


def _systems(records: Sequence[Record]) -> list[str]:
    lines = [
        "| system | answers | refused | tokens/s | to our plain | to its own plain | TTFT p50, ms "
        "| acceptance length | answers with drafts |",
        "|---" * 9 + "|",
    ]
    for record in records:
        cells = [
            record["system"], str(record["answers"]), str(record["refused"]),
            number(record["tokens_per_s"]),
            _ratio(record["to_plain"], ALL), _ratio(record["to_own_plain"], ALL),
            number(record["ttft_p50_ms"]), number(record["acceptance_length"][ALL], 2),
            f"{record['drafted_share']:.0%}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _tasks(records: Sequence[Record]) -> list[str]:
    """Ratio to plain and acceptance length by task, of whoever has a plain mode to compare with."""
    chosen = [record for record in records if record["to_own_plain"]]
    if not chosen:
        return []
    tasks = [task for task in chosen[0]["acceptance_length"] if task != ALL]
    lines = ["| by task | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    for record in chosen:
        ratios = [_ratio(record["to_own_plain"], task) for task in tasks]
        lengths = [number(record["acceptance_length"].get(task), 2) for task in tasks]
        lines.append(f"| {record['system']}, to its own plain | " + " | ".join(ratios) + " |")
        lines.append(f"| {record['system']}, acceptance length | " + " | ".join(lengths) + " |")
    return lines


def _ratio(ratios: Mapping[str, Any] | None, task: str) -> str:
    found = ratios.get(task) if ratios else None
    if found is None:
        return ""
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def picture(document: Mapping[str, Any], path: Path) -> None:
    """Ratio to plain by task, one row per law, one group per level; RuntimeError without
    matplotlib."""
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise RuntimeError("no picture without matplotlib; pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = document["settings"]
    ours = [
        record
        for record in document["summary"]
        if record["system"] == OURS and record["to_own_plain"]
    ]
    if not ours:
        return
    tasks = list(ours[0]["to_own_plain"])
    laws, levels = settings["laws"], settings["concurrency"]
    figure, rows = pyplot.subplots(
        len(laws), 1, figsize=(2.0 + 2.4 * len(levels), 3.2 * len(laws)), squeeze=False
    )
    width = 0.8 / len(tasks)
    for law, (axis,) in zip(laws, rows, strict=True):
        for place, task in enumerate(tasks):
            points = [
                (levels.index(record["concurrency"]), found)
                for record in ours
                if record["law"] == law and (found := record["to_own_plain"].get(task))
            ]
            values = [found["value"] for _, found in points]
            errors = [
                [found["value"] - found["low"] for _, found in points],
                [found["high"] - found["value"] for _, found in points],
            ]
            axis.bar(
                [level + place * width for level, _ in points], values, width, yerr=errors,
                label=task, error_kw={"linewidth": 0.8},
            )  # fmt: skip
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks([level + 0.4 - width / 2 for level in range(len(levels))], levels)
        axis.set_xlabel("requests at a time")
        axis.set_ylabel("speed to plain decoding")
        axis.set_title(law)
    rows[0][0].legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
