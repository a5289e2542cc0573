"""Records are written with a row a line, and all that are committed are so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support.record import OUT, rows


def test_what_has_no_parts_shares_a_line() -> None:
    table = {"law": "greedy", "count": 4, "cells": [{"mean": 1.5, "name": "a" * 100}] * 2, "no": []}
    said = rows(table)
    assert json.loads(said) == table
    lines = [line.strip() for line in said.splitlines()]
    row = json.dumps(table["cells"][0])
    assert lines == [
        "{",
        '"law": "greedy", "count": 4,',
        '"cells": [',
        f"{row},",
        row,
        "],",
        '"no": []',
        "}",
    ]


@pytest.mark.parametrize("path", sorted(OUT.rglob("*.json")), ids=lambda path: path.stem)
def test_a_committed_record_is_written_so(path: Path) -> None:
    if path.name.endswith(".raw.json"):
        pytest.skip("not committed")
    text = path.read_text("utf-8")
    assert text == rows(json.loads(text)) + "\n"
