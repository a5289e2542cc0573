"""The training commands explain wrong options."""

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
        (("drafter", "x", "--target", "y"), "--steps --minutes"),
        (("drafter", "x", "--target", "y", "--steps", "5", "--minutes", "1"), "not allowed with"),
        (("drafter", "x", "--target", "y", "--minutes", "nan"), "'nan' is no number above 0"),
        (("drafter", "x", "--steps", "5"), "--target"),
        (
            ("drafter", "x", "--target", "y", "--steps", "5", "--layers", "0"),
            "'0' is no whole number of at least 1",
        ),
    ],
)
def test_bad_options_are_explained(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--models", "--work"])
def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    words = ("drafter", "x", "--target", "none", "--steps", "5", option, str(tmp_path / "file"))
    other = "--work" if option == "--models" else "--models"
    assert run(parse(*words, other, str(tmp_path))) == 2
    assert f"{option}: {tmp_path / 'file'} cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("demo",), "`make train`"),
        (("demo", "demo-draft", "--steps", "5", "--help"), "`python -m models.recipe train`"),
        (("evaluate", "--skip-bits"), "`python -m models.recipe bits`"),
        (("evaluate", "--max-bytes", "9"), "`python -m models.recipe bits`"),
    ],
)
def test_what_has_left_says_where_it_is(
    words: tuple[str, ...], instead: str, capsys: pytest.CaptureFixture[str]
):
    assert run(parse(*words)) == 2
    said = capsys.readouterr().err
    assert "gone" in said
    assert instead in said


def test_without_a_target_there_is_nothing_to_compare(capsys: pytest.CaptureFixture[str]):
    assert run(parse("evaluate")) == 2
    assert "--target: name the model" in capsys.readouterr().err


def test_missing_questions_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    missing = str(tmp_path / "questions.jsonl")
    assert run(parse("evaluate", "--target", "x", "--questions", missing)) == 2
    assert f"{missing}: no questions" in capsys.readouterr().err
