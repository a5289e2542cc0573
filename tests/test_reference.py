import dataclasses
import pkgutil
from pathlib import Path

import pytest

from cluster import metrics, reference
from cluster.draft.registry import KINDS


def test_the_generated_pages_are_fresh() -> None:
    assert reference.main(["--check"]) == 0, "run `make docs` and commit the result"


def test_a_stale_or_missing_page_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "DOCS", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    page = tmp_path / "docs" / "metrics.md"
    page.write_text(page.read_text(encoding="utf-8") + "x", encoding="utf-8")
    (tmp_path / "docs" / "configuration.md").unlink()
    capsys.readouterr()
    assert reference.main(["--check"]) == 1
    reported = capsys.readouterr().err
    assert "metrics.md is stale" in reported
    assert "configuration.md is stale" in reported


def test_every_key_of_the_configuration_is_explained() -> None:
    for line in reference.configuration_page().splitlines():
        if line.startswith("| `"):
            assert line.split("|")[4].strip(), line


def test_every_drafter_kind_and_every_metric_has_its_place() -> None:
    configuration = reference.configuration_page()
    for name, kind in KINDS.items():
        assert f"of kind `{name}`" in configuration
        for field in dataclasses.fields(pkgutil.resolve_name(kind.options)):
            assert f"| `{field.name}` |" in configuration
    page = reference.metrics_page()
    for metric in metrics.ALL:
        assert f"| `{metric.name}` | {metric.kind} |" in page


def test_a_docstring_is_split_into_its_summary_and_its_fields() -> None:
    summary, meanings = reference.split_docstring(
        "What it is.\n\nfirst: one thing: here.  second,\nthird: in pairs.\nfourth: last\none.",
        ["first", "third", "fourth"],
    )
    assert summary == "What it is."
    assert meanings["first"] == "one thing: here. second,"
    assert meanings["third"] == "in pairs."
    assert meanings["fourth"] == "last one."
