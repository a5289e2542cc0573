"""Tables of the generated pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table, and the end of its last line."""
    lines = (_row(head), "|---" * len(head) + "|", *map(_row, rows))
    return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |"
