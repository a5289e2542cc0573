"""Writes the table and the picture of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.page import head, not_measured, number, origin, pyplot, ratio, row

_TITLES = (
    "system", "runs", "tokens/s", "whole run", "to ours plain", "to the fastest peer", "TTFT p50",
    "ITL p50", "ITL p99", "acceptance length", "one stream, not looping", "one stream, looping",
)  # fmt: skip

Record = Mapping[str, Any]


def markdown(document: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    settings = document["settings"]
    lines = [
        "# Comparison",
        "",
        f"{origin(document)} All systems on cores {', '.join(map(str, settings['cores']))}.",
        "",
        f"Target: `{settings['target']}`{_grown(settings)}, {settings['dtype']}. "
        f"{settings['max_tokens']} tokens per prompt, end-of-sequence ignored. Prompts are in the "
        "prefix cache where a system has one; rates are those of decoding alone, while so many are "
        "decoded at a time. Medians over runs; ratios with 95 % bootstrap intervals over runs (and "
        "over prompts at concurrency 1).",
        "A prompt is looping when an 8-gram of some system's output occurs three times. Latencies "
        "in milliseconds.",
    ]
    records = document["summary"]
    for law in settings["laws"]:
        for concurrency in settings["concurrency"]:
            chosen = [r for r in records if (r["law"], r["concurrency"]) == (law, concurrency)]
            if chosen:
                lines += ["", *_table(law, concurrency, chosen)]
    lines += not_measured(document["failures"])
    return "\n".join(lines) + "\n"


def _grown(settings: Mapping[str, Any]) -> str:
    origin = settings.get("grown_from")
    if not origin:
        return ""
    return f" (**grown** from {origin['model']}: its text, a larger model's cost)"


def _table(law: str, concurrency: int, records: Sequence[Record]) -> list[str]:
    fastest = records[0]["fastest_peer"]
    title = f"## {law}, concurrency {concurrency}"
    notes = [f"fastest peer: {fastest}"] if fastest else []
    notes.append(f"looping prompts: {records[0]['num_looping']}")
    lines = [title, "", "; ".join(notes).capitalize() + ".", "", *head(_TITLES)]
    for record in records:
        cells = [
            record["system"],
            str(record["runs"]),
            number(record["tokens_per_s"]),
            number(record["whole_tokens_per_s"]),
            ratio(record.get("to_plain")),
            ratio(record.get("to_fastest_peer")),
            number(record["ttft_p50_ms"]),
            number(record["itl_p50_ms"]),
            number(record["itl_p99_ms"]),
            number(record["mean_acceptance_length"], 2),
            number(record["not_looping"]),
            number(record["looping"]),
        ]
        lines.append(row(cells))
    return lines


def picture(document: Mapping[str, Any], path: Path) -> None:
    """Decode rates as bars, one row per sampling setting; RuntimeError without matplotlib."""
    plots = pyplot()
    settings = document["settings"]
    laws, levels, systems = settings["laws"], settings["concurrency"], settings["systems"]
    figure, rows = plots.subplots(
        len(laws), 1, figsize=(1.5 + 2.2 * len(levels), 3.2 * len(laws)), squeeze=False
    )
    width = 0.8 / len(systems)
    for law, (axis,) in zip(laws, rows, strict=True):
        for place, system in enumerate(systems):
            chosen = [
                record
                for record in document["summary"]
                if (record["law"], record["system"]) == (law, system)
            ]
            axis.bar(
                [levels.index(record["concurrency"]) + place * width for record in chosen],
                [record["tokens_per_s"] for record in chosen],
                width,
                label=system,
            )
        axis.set_xticks([level + 0.4 - width / 2 for level in range(len(levels))], levels)
        axis.set_xlabel("concurrency")
        axis.set_ylabel("tokens/s, decoding")
        axis.set_title(law)
    rows[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plots.close(figure)
