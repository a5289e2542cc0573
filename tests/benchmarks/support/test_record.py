"""A record keeps raw results apart from its report, and continues only what it measured itself."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.support.page import origin
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


def test_a_report_says_where_it_comes_from(tmp_path: Path) -> None:
    document = write_report(tmp_path / "some.json", {"commits": ["abc", ""]})
    line = origin(document)
    assert line.startswith(f"`{document['command']}`, {document['date']}, commit abc, ")
    assert f"torch {document['versions']['torch']}" in line


def test_a_reason_is_the_last_line_and_of_a_group_that_of_its_first_error() -> None:
    group = ExceptionGroup("several", [RuntimeError("a log says:\nout of memory"), OSError()])
    assert reason_of(group) == "out of memory"
    assert reason_of(OSError()) == "OSError"
