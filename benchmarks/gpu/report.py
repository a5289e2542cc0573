"""Writes the Markdown of `benchmarks.gpu`: a section for each part, with all of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.support.page import head, origin, row


def markdown(report: Mapping[str, Any]) -> str:
    """The Markdown page; all its figures come from `report`."""
    lines = [f"# {report['device']}, {report['date']}", ""]
    if report["tiny"]:
        lines += [
            "**A trial of the path at tiny sizes: these figures say nothing about speed.**",
            "",
        ]
    lines += [f"{origin(report)}  {report['seconds']:.0f} s in all.", ""]
    for name, part in report["parts"].items():
        lines += [f"## {name}", "", *_section(part), ""]
    return "\n".join(lines)


def _section(part: Mapping[str, Any]) -> Iterator[str]:
    if "failed" in part:
        yield f"**FAILED**: {part['failed']}"
        yield ""
    # Rows of one kind have the same columns.
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for each in part["rows"]:
        told = {name: value for name, value in each.items() if name != "traceback"}
        kinds.setdefault(tuple(told), []).append(told)
    for columns, rows in kinds.items():
        yield from _table(columns, rows)
    for each in part["rows"]:
        if "traceback" in each:
            yield from _quoted(each["traceback"].splitlines())
    if "log" in part:
        yield from _quoted(part["log"])


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from head(columns)
    for each in rows:
        yield row(_cell(each[name]) for name in columns)
    yield ""


def _quoted(lines: Sequence[str]) -> Iterator[str]:
    yield from ("```", *lines, "```", "")


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
