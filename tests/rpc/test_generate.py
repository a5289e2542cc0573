"""The committed stubs equal the generated ones, and every field of the protos is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.rpc.generate import FOLDERS, contract, generate, main, stale

_FIELD = re.compile(r"^\s+(optional |repeated |map<[^>]+> |)?[\w.]*\s*\w+ = \d+;")


def test_committed_stubs_are_fresh() -> None:
    assert main(["--check"]) == 0


def test_stale_missing_and_left_over_stubs_are_named(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "old_pb2.py").write_text("left over")
        (tmp_path / folder / "new_pb2.py").write_text("edited")
        names = [f"{folder}/{name}_pb2.py" for name in ("more", "new", "old")]
        assert stale({names[0]: "", names[1]: "fresh"}, tmp_path) == names
        (tmp_path / folder / "old_pb2.py").unlink()
        (tmp_path / folder / "new_pb2.py").unlink()


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
