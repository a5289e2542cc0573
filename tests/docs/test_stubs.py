"""Stubs that are left over are found, and every field of the protos is documented."""

import re
from pathlib import Path

import pytest

from docs.tools.stubs import FOLDERS, contract, files, generate

_FIELD = re.compile(r"^\s+(optional |repeated |map<[^>]+> |)?[\w.]*\s*\w+ = \d+;")


def test_a_stub_that_is_left_over_is_to_go(tmp_path: Path):
    old = [tmp_path / folder / "old_pb2.py" for folder in FOLDERS]
    for path in old:
        path.parent.mkdir(parents=True)
        path.write_text("left over")
    wanted = files(tmp_path)
    assert [path for path, text in wanted.items() if text is None] == old
    assert len(wanted) > 10


def test_a_folder_without_protos_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="source checkout"):
        generate(tmp_path)


@pytest.mark.parametrize("path", contract(), ids=lambda p: p.name)
def test_every_field_of_the_protos_is_commented(path: Path):
    lines = path.read_text().splitlines()
    fields = [index for index, line in enumerate(lines) if _FIELD.match(line)]
    assert fields
    for index in fields:
        assert lines[index - 1].strip().startswith("//"), lines[index]
