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
        (("demo",), "--steps --minutes"),
        (("demo", "--steps", "5", "--minutes", "1"), "not allowed with"),
        (("demo", "--steps", "0"), "'0' is no whole number of at least 1"),
        (("demo", "--minutes", "nan"), "'nan' is no number above 0"),
        (("drafter", "x", "--steps", "5"), "--target"),
        (
            ("drafter", "x", "--target", "y", "--steps", "5", "--layers", "0"),
            "'0' is no whole number of at least 1",
        ),
        (("evaluate", "--max-bytes", "x"), "'x' is no whole number"),
    ],
)
def test_bad_options_are_explained(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*words)
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--models", "--work"])
def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ("drafter", "x", "--target", "none", "--steps", "5", option, str(tmp_path / "file"))
    other = "--work" if option == "--models" else "--models"
    assert run(parse(*words, other, str(tmp_path))) == 2
    assert f"{option}: {tmp_path / 'file'} cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("demo", "demo-draft-poetry", "--steps", "5"), "known: demo-target"),
        (("evaluate",), "drafthouse train demo"),
        (("evaluate", "--skip-bits"), "demo-target"),
    ],
)
def test_wrong_names_and_missing_models_are_named(
    words: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parse(*words, "--models", str(tmp_path))) == 2
    assert complaint in capsys.readouterr().err
