"""The held-out split is fixed, and disjoint from the training text."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.train.corpus import Document, conversations, load_corpus

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


def test_reading_skips_excluded_folders_tables_and_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(lines(2).encode() + b"\xe9\xff")
    files = {
        "site-packages/other.py": lines(1),
        "table.py": "0x00, 0x01, 0x02,\n" * 100,
        "good.py": lines(3),
        "short.py": "pass\n",
    }
    assert code_paths(read(tmp_path, files)) == ["good.py"]


def test_a_missing_corpus_names_the_package_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent; install python3"):
        load_corpus({"code": tmp_path / "absent", "prose": tmp_path})


def test_conversations_ask_for_functions_and_explain_sections() -> None:
    (function_text,) = conversations(
        Document(
            "code",
            "area.py",
            'class Shape:\n    def area(self, width, height):\n        """Surface of a rectangle.\n'
            "\n        Both sides are lengths in metres, and must not be negative.\n"
            '        """\n        if width < 0 or height < 0:\n'
            "            raise ConfigError(width, height)\n        return width * height\n",
        )
    )
    assert "Surface of a rectangle." in function_text.split("<|assistant|>")[0]
    assert "<|assistant|>def area(self, width, height):\n    " in function_text
    assert function_text.endswith("    return width * height<|end|>")
    sentence = "A budget is the number of tokens that one step may verify for all of its requests."
    text = f"Budgets\n=======\n\n{sentence}\n\n{sentence}\n"
    (section,) = conversations(Document("prose", "budget.rst", text))
    assert section == f"<|user|>Explain: Budgets<|end|><|assistant|>{sentence}<|end|>"
