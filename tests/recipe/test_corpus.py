"""The held-out split is fixed, and disjoint from the training text."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import ConfigError
from models.recipe.corpus import Document, load_corpus

PATHS = [f"package/module_{index}.py" for index in range(4000)]
HELD_OUT = [path for path in PATHS if Document("code", path, "").is_held_out]
LEARNT = [path for path in PATHS if path not in set(HELD_OUT)]
FROZEN = ["package/module_40.py", "package/module_46.py", "package/module_64.py"]


def lines(seed: int, num_lines: int = 30) -> str:
    return "".join(
        f"line {index} of document {seed} says something that no other line says\n"
        for index in range(num_lines)
    )


def read(root: Path, files: dict[str, str]) -> list[Document]:
    """The documents of a machine with these files of code and one of prose."""
    for path, text in {"prose/index.rst.txt": lines(1000), **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return load_corpus({"code": root, "prose": root / "prose"})


def code_paths(documents: list[Document]) -> list[str]:
    return [each.path for each in documents if each.kind == "code"]


def test_split_by_path_never_changes_and_holds_out_about_one_in_twenty() -> None:
    # Must not change: otherwise new models train on text that earlier models were measured on.
    assert HELD_OUT[:3] == FROZEN
    assert 0.8 < len(HELD_OUT) / len(PATHS) * 20 < 1.2


def test_text_in_both_parts_leaves_the_held_out_part(tmp_path: Path) -> None:
    near_copy = lines(1, num_lines=20) + lines(9, num_lines=10)
    files = {
        HELD_OUT[0]: lines(1).upper(),
        HELD_OUT[1]: lines(2),
        HELD_OUT[2]: near_copy,
        LEARNT[0]: lines(1),
        LEARNT[1]: lines(1).replace(" ", "  "),
    }
    found = code_paths(read(tmp_path, files))
    assert found == [LEARNT[0], HELD_OUT[1]]


def test_a_missing_corpus_names_the_package_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent; install python3"):
        load_corpus({"code": tmp_path / "absent", "prose": tmp_path})
