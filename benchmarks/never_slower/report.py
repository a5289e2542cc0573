"""Writes the tables of `benchmarks.never_slower`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.never_slower.figures import CONTROL, MIN_TO_PLAIN
from benchmarks.support.page import head, not_measured, number, origin, ratio, row

_TITLES = {
    "normal": "With the drafters of the configuration",
    "random": "With a drafter of random tokens",
    "sleeper": "With a drafter that sleeps half a second",
    "pool-random": "With a drafter of random tokens in the pool",
    "pool-sleeper": "With a drafter in the pool that sleeps half a second",
    CONTROL: "Plain decoding against itself, in two sets of processes",
}

Record = Mapping[str, Any]


def _cores(settings: Mapping[str, Any]) -> str:
    cores = ", ".join(map(str, settings["cores"]))
    if not settings.get("target_cores"):
        return f"Everything on cores {cores}."
    own = ", ".join(map(str, settings["target_cores"]))
    return f"The target on core {own}, everything else on the others of {cores}."


def markdown(document: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    settings, summary = document["settings"], document["summary"]
    lines = [
        "# How much slower than plain decoding",
        "",
        f"{origin(document)} {_cores(settings)}",
        "",
        f"Target: `{settings['model']}`, `{settings['config']}`"
        f"{''.join(f' `{each}`' for each in settings['overrides'])}; {settings['max_tokens']} "
        "tokens per prompt, end-of-sequence ignored. A pair is the same prompts and seeds, once "
        "with speculation and once without, each in processes of its own while those of the other "
        "are stopped. Figures are our tokens per second to those of plain decoding while as many "
        "requests were under way as the column says, mean over pairs with the 95 % interval by "
        "Student's t.",
        "",
        f"Bars: the geometric mean of every stack's cells surely at least {MIN_TO_PLAIN}, no cell "
        "surely below it.",
        "",
        _verdict(summary),
        "",
        *head(["stack", "geometric mean", "pairs"]),
        *(row([_title(e["stack"]), _entry(e), str(e["count"])]) for e in summary["stacks"]),
    ]
    stacks = list(dict.fromkeys(record["stack"] for record in summary["cells"]))
    for stack in stacks:
        chosen = [record for record in summary["cells"] if record["stack"] == stack]
        lines += ["", f"## {_title(stack)}", "", *_table(chosen)]
        lines += ["", "Whole runs, which end with fewer requests at a time, in the same order: "]
        lines[-1] += "; ".join(_whole_row(chosen)) + "."
    lines += not_measured(document["failures"])
    return "\n".join(lines) + "\n"


def _verdict(summary: Mapping[str, Any]) -> str:
    failures = summary["failures"]
    if not failures:
        return "**Every measured cell meets its bar.**"
    return f"**Below the bar, or not surely above it: {', '.join(failures)}.**"


def _title(stack: str) -> str:
    return _TITLES.get(stack, stack)


def _table(records: Sequence[Record]) -> list[str]:
    """One row per kind and sampling setting, one column per concurrency."""
    levels = sorted({record["concurrency"] for record in records})
    rows = dict.fromkeys((record["kind"], record["law"]) for record in records)
    lines = head(["prompts", "law", *(f"{level} at a time" for level in levels)])
    for kind, law in rows:
        found = {
            record["concurrency"]: _entry(record)
            for record in records
            if (record["kind"], record["law"]) == (kind, law)
        }
        cells = [found.get(level, "") for level in levels]
        lines.append(row([kind, law, *cells]))
    return lines


def _entry(record: Record) -> str:
    text = ratio({"value": record["mean"], "low": record["low"], "high": record["high"]})
    return f"**{text}**" if record["passes"] is False else text


def _whole_row(records: Sequence[Record]) -> list[str]:
    rows = dict.fromkeys((record["kind"], record["law"]) for record in records)
    return [
        ", ".join(number(r["whole"], 2) for r in records if (r["kind"], r["law"]) == row)
        for row in rows
    ]
