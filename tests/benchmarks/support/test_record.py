"""A record keeps raw results apart from its report, and continues only what it measured itself."""

import json
from pathlib import Path

import pytest

from benchmarks.support.page import origin
from benchmarks.support.record import OUT, Record, reason_of, rows, write_report


def test_the_report_has_the_summary_and_only_the_raw_file_every_result(tmp_path: Path):
    record = Record(tmp_path / "some.json", {"tokens": 4})
    record.add("a/1", {"times": list(range(1000))})
    document = record.publish([{"rate": 2.0}])
    written = json.loads((tmp_path / "some.json").read_text("utf-8"))
    assert written == document
    assert written["summary"] == [{"rate": 2.0}]
    assert "times" not in (tmp_path / "some.json").read_text("utf-8")
    assert Record(tmp_path / "some.json", {"tokens": 4}).results == record.results


def test_a_report_says_where_it_comes_from(tmp_path: Path):
    document = write_report(tmp_path / "some.json", {"commits": ["abc", ""]})
    line = origin(document)
    assert line.startswith(f"`{document['command']}`, {document['date']}, commit abc, ")
    assert f"torch {document['versions']['torch']}" in line


def test_a_reason_is_the_last_line_and_of_a_group_that_of_its_first_error():
    group = ExceptionGroup("several", [RuntimeError("a log says:\nout of memory"), OSError()])
    assert reason_of(group) == "out of memory"
    assert reason_of(OSError()) == "OSError"


def test_what_has_no_parts_shares_a_line():
    table = {"law": "greedy", "count": 4, "cells": [{"mean": 1.5, "name": "a" * 100}] * 2, "no": []}
    said = rows(table)
    assert json.loads(said) == table
    lines = [line.strip() for line in said.splitlines()]
    row = json.dumps(table["cells"][0])
    assert lines == [
        "{",
        '"law": "greedy", "count": 4,',
        '"cells": [',
        f"{row},",
        row,
        "],",
        '"no": []',
        "}",
    ]


@pytest.mark.parametrize("path", sorted(OUT.rglob("*.json")), ids=lambda path: path.stem)
def test_a_committed_record_is_written_so(path: Path):
    if path.name.endswith(".raw.json"):
        pytest.skip("not committed")
    text = path.read_text("utf-8")
    assert text == rows(json.loads(text)) + "\n"
