"""The committed stubs equal the generated ones, and every field of the protos is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.rpc.generate import contract, generate, main, stale

_FIELD = re.compile(r"^\s+(optional |repeated |map<[^>]+> |)?[\w.]*\s*\w+ = \d+;")


def test_committed_stubs_are_fresh() -> None:
    assert main(["--check"]) == 0


def test_stale_missing_and_left_over_stubs_are_named(tmp_path: Path) -> None:
    (tmp_path / "old_pb2.py").write_text("left over")
    (tmp_path / "new_pb2.py").write_text("edited")
    assert stale({"new_pb2.py": "fresh", "more_pb2.py": ""}, tmp_path) == [
        "more_pb2.py",
        "new_pb2.py",
        "old_pb2.py",
    ]


def test_a_folder_without_protos_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="source checkout"):
        generate(tmp_path)


@pytest.mark.parametrize("path", contract(), ids=lambda p: p.name)
def test_every_field_of_the_protos_is_commented(path: Path) -> None:
    lines = path.read_text().splitlines()
    fields = [index for index, line in enumerate(lines) if _FIELD.match(line)]
    assert fields
    for index in fields:
        assert lines[index - 1].strip().startswith("//"), lines[index]
