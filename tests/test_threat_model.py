"""The threat model's claims name tests, and those are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))
DOORS = PAGE[PAGE.index("## Doors") : PAGE.index("## What is not defended")]


@pytest.mark.parametrize(("file", "name"), NAMED, ids=list(map("::".join, NAMED)))
def test_a_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    assert name in found if name else any(each.startswith("test_") for each in found)


def test_every_door_names_the_test_that_shows_its_defence() -> None:
    rows = [line for line in DOORS.splitlines() if line.startswith("| ")]
    claims = [row for row in rows if not row.startswith("| what somebody tries")]
    assert len(claims) > 30
    assert [row for row in claims if "`tests/" not in row] == []
