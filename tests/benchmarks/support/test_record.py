"""A record keeps raw results apart from its report, and continues only what it measured itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.support.page import origin, ratio
from benchmarks.support.record import Record, reason_of, write_report


def test_the_report_has_the_summary_and_only_the_raw_file_every_result(tmp_path: Path) -> None:
    record = Record(tmp_path / "some.json", {"tokens": 4})
    record.add("a/1", {"times": list(range(1000))})
    document = record.publish([{"rate": 2.0}])
    written = json.loads((tmp_path / "some.json").read_text("utf-8"))
    assert written == document
    assert written["summary"] == [{"rate": 2.0}]
    assert "times" not in (tmp_path / "some.json").read_text("utf-8")
    assert Record(tmp_path / "some.json", {"tokens": 4}).results == record.results


def test_results_of_other_settings_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    Record(path, {"tokens": 4, "pairs": 2}).add("a", 1)
    with pytest.raises(ValueError, match="measured with other tokens; name another"):
        Record(path, {"tokens": 5, "pairs": 2})
    assert Record(path, {"tokens": 5, "pairs": 2}, fresh=True).results == {}
    with pytest.raises(ValueError, match="other pairs"):
        Record(path, {"tokens": 4, "pairs": 3})
    assert Record(path, {"tokens": 4, "pairs": 3}, free=("pairs",)).results == {"a": 1}


def test_a_report_says_where_it_comes_from(tmp_path: Path) -> None:
    document = write_report(tmp_path / "some.json", {"commits": ["abc", ""]})
    line = origin(document)
    assert line.startswith(f"`{document['command']}`, {document['date']}, commit abc, ")
    assert f"torch {document['versions']['torch']}" in line


def test_a_reason_is_the_last_line_and_of_a_group_that_of_its_first_error() -> None:
    group = ExceptionGroup("several", [RuntimeError("a log says:\nout of memory"), OSError()])
    assert reason_of(group) == "out of memory"
    assert reason_of(OSError()) == "OSError"


def test_a_ratio_is_shown_with_its_interval_where_there_is_one() -> None:
    assert ratio({"value": 1.234, "low": 1.0, "high": 2.0}) == "1.23 (1.00 to 2.00)"
    assert ratio({"value": 1.234, "low": None, "high": None}) == "1.23"
    assert ratio(None) == ""
