"""Writes the table of checks: client, version, check and result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.clients.running import Row
from benchmarks.support.record import write_report

Rows = Mapping[str, Sequence[Row]]


def read_rows(path: Path) -> dict[str, list[Row]]:
    """The rows of the last run; none if there was none."""
    if not path.exists():
        return {}
    former = json.loads(path.read_text("utf-8"))["summary"]
    return {name: [Row(**row) for row in rows] for name, rows in former.items()}


def publish(path: Path, rows: Rows, settings: Mapping[str, str]) -> None:
    """Write the record and, beside it, the table."""
    summary = {name: [dataclasses.asdict(row) for row in found] for name, found in rows.items()}
    document = write_report(path, {"settings": settings, "summary": summary})
    heading = [
        "# Clients that others wrote",
        "",
        f"`{document['command']}`, {document['date']}, model `{settings['model']}`.",
        "",
        "| client | version | what was run | result | note |",
        "|---|---|---|---|---|",
    ]
    lines = [_line(name, row) for name, found in rows.items() for row in found]
    path.with_suffix(".md").write_text("\n".join([*heading, *lines]) + "\n", "utf-8")


def _line(name: str, row: Row) -> str:
    note = row.note.replace("|", "\\|")
    return f"| {name} | {row.version} | {row.check} | {row.result} | {note} |"
