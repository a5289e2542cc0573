"""Parts of the pages that benchmarks write: cells of tables, origins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def number(value: float | None, digits: int = 1) -> str:
    """A table cell; empty if there is no value."""
    return "" if value is None else f"{value:.{digits}f}"


def ratio(found: Mapping[str, Any] | None) -> str:
    """A value with its interval, if it has one."""
    if found is None:
        return ""
    text = number(found["value"], 2)
    if found["low"] is None:
        return text
    return f"{text} ({number(found['low'], 2)} to {number(found['high'], 2)})"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(titles: Iterable[str]) -> list[str]:
    """The first two lines of a table."""
    titles = list(titles)
    return [row(titles), "|---" * len(titles) + "|"]


def origin(document: Mapping[str, Any]) -> str:
    """Return the origin of a report in one line."""
    machine = document["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items())
    commits = ", ".join(filter(None, document.get("commits", [])))
    return (
        f"`{document['command']}`, {document['date']}"
        f"{', commit ' * bool(commits)}{commits}, {machine['cpu']}, {machine['cores']} cores, "
        f"Python {machine['python']}, {versions}."
    )


def not_measured(failures: Mapping[str, str]) -> list[str]:
    """The section that names what failed; no lines if nothing did."""
    if not failures:
        return []
    return ["", "## Not measured", "", *(f"- {name}: {why}" for name, why in failures.items())]
