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
    rows = [line for line in reference.configuration_page().splitlines() if line.startswith("| `")]
    for line in rows:
        *_, told, _ = line.split("|")
        assert told.strip(), line
    assert any(line.count("|") > 4 for line in rows)


def test_every_drafter_kind_and_every_metric_has_its_place() -> None:
    configuration = reference.configuration_page()
    for name, kind in KINDS.items():
        assert f"of kind `{name}`" in configuration
        for field in dataclasses.fields(pkgutil.resolve_name(kind.options)):
            assert f"| `{field.name}` |" in configuration
    page = reference.metrics_page()
    for metric in metrics.ALL:
        assert f"| `{metric.name}` | {metric.kind} |" in page


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    """Two fields."""

    first: int = 0
    """One
    thing."""
    second: int = 0
    """Another."""


@dataclasses.dataclass(frozen=True, slots=True)
class Derived(Base):
    second: int = 1
    """A third one."""
    bare: int = 0


def test_the_text_of_a_field_stands_below_it_in_the_class_or_in_a_base() -> None:
    texts = {"first": "One thing.", "second": "A third one.", "bare": ""}
    assert reference.field_texts(Derived) == texts
