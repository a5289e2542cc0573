import dataclasses
import pkgutil
from pathlib import Path

import pytest

from cluster import metrics
from cluster.config.file import load
from cluster.draft.registry import KINDS
from docs.tools import __main__ as tools
from docs.tools import reference
from docs.tools.texts import TEN


def test_what_is_stale_missing_or_left_over_is_reported_and_written(tmp_path: Path):
    old, edited, kept, new = (tmp_path / name for name in ("old", "edited", "kept", "new"))
    for path in (old, edited, kept):
        path.write_text("x")
    wanted = {old: None, edited: "y", kept: "x", new: "z"}
    stale = [old, edited, new]
    assert tools.renew(wanted, check=True) == stale
    assert not new.exists()
    assert tools.renew(wanted, check=False) == stale
    assert tools.renew(wanted, check=True) == []
    assert not old.exists()


def test_a_stale_page_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(reference, "EVENTS_HEAD", "another")
    assert tools.main(["pages", "--check"]) == 1
    assert capsys.readouterr().err == "docs/events.md is stale; run: make docs\n"


def test_every_key_of_the_configuration_is_explained():
    rows = [line for line in reference.configuration_page().splitlines() if line.startswith("| `")]
    for line in rows:
        *_, told, _ = line.split("|")
        assert told.strip(), line
    assert any(line.count("|") > 4 for line in rows)


def test_the_ten_keys_that_matter_are_keys_with_values_that_fit():
    assert len(TEN) == 10
    loaded = load(tools.ROOT / "configs" / "tiny.yaml", [example for example, _ in TEN])
    assert loaded.config.coordinator.max_draft_tokens == 8


def test_every_drafter_kind_and_every_metric_has_its_place():
    configuration = reference.configuration_page()
    for name, kind in KINDS.items():
        assert f"of kind `{name}`" in configuration
        for field in dataclasses.fields(pkgutil.resolve_name(kind.options)):
            assert f"| `{field.name}` |" in configuration
    page = reference.metrics_page()
    for metric in metrics.ALL:
        assert f"| `{metric.name}` | {metric.kind} |" in page
