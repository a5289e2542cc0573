"""The training commands explain wrong options."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from cluster.train.cli import configure, run


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="drafthouse train")
    configure(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "STEP"),
        (("target",), "--steps --minutes"),
        (("target", "--steps", "5", "--minutes", "1"), "not allowed with"),
        (("target", "--steps", "0"), "0 is not positive"),
        (("target", "--minutes", "nan"), "nan is not a positive number"),
        (("drafter", "x", "--target", "y", "--steps", "5", "--layers", "0"), "0 is not positive"),
        (("evaluate", "--max-bytes", "x"), "invalid"),
    ],
)
def test_bad_options_are_explained(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_an_unknown_drafter_is_told_the_known_ones_and_how_a_new_one_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("drafter", "demo-draft-poetry", "--steps", "5", "--work", str(tmp_path))
    assert run(parse(*words)) == 2
    complaint = capsys.readouterr().err
    assert "demo-draft-prose" in complaint
    assert "--target" in complaint


def test_training_before_the_tokenizer_names_the_missing_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = parse("target", "--steps", "1", "--work", str(tmp_path))
    assert run(arguments) == 2
    assert "drafthouse train tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("generate",),
        ("drafter", "demo-draft", "--steps", "1"),
        ("evaluate", "--skip-bits"),
    ],
)
def test_missing_inputs_are_named_with_the_step_that_makes_them(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--models", str(tmp_path)]
    if words[0] != "evaluate":
        folders += ["--work", str(tmp_path)]
    assert run(parse(*words, *folders)) == 2
    complaint = capsys.readouterr().err
    assert str(tmp_path) in complaint
    assert "drafthouse train" in complaint
