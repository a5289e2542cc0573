"""The recipe's commands explain wrong options."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.recipe.__main__ import parse, run


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "STEP"),
        (("train",), "--steps --minutes"),
    ],
)
def test_bad_options_are_explained(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse([*words])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("train", "demo-draft-poetry", "--steps", "5"), "known: demo-target"),
        (("bits",), "`make train`"),
    ],
)
def test_wrong_names_and_missing_models_are_named(
    words: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parse([*words, "--models", str(tmp_path)])) == 2
    assert complaint in capsys.readouterr().err
