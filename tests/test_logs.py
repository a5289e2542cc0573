"""Both forms of a log, and what each line has as JSON."""

import json
import logging
from datetime import datetime
from typing import Any

import pytest

from cluster import logs


def line(message: str, *arguments: object, why: Any = None) -> dict[str, Any]:
    record = logging.LogRecord("a.b", logging.WARNING, "x.py", 1, message, arguments, why)
    found = logs.JsonLines().format(record)
    assert "\n" not in found
    return json.loads(found)


def test_a_line_is_an_object_with_time_level_logger_and_message():
    found = line("one %s\ntwo", "x")
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert found == {"level": "WARNING", "logger": "a.b", "message": "one x\ntwo"}


def test_arguments_with_names_are_keys_and_what_is_unknown_is_left_out():
    found = line("%(n)d of %(m)s", {"n": 3, "m": logs.UNKNOWN})
    assert (found["message"], found["n"]) == ("3 of -", 3)
    assert "m" not in found


def test_the_request_that_is_served_is_on_each_line():
    assert "request_id" not in line("x")
    named = logs.REQUEST_ID.set("abc")
    assert line("x")["request_id"] == "abc"
    logs.REQUEST_ID.reset(named)
    assert "request_id" not in line("x")


def test_an_exception_is_part_of_its_line():
    try:
        raise ValueError("why")
    except ValueError as error:
        found = line("m", why=(ValueError, error, None))
    assert found["exception"].endswith("ValueError: why")


def test_a_process_says_all_in_the_form_that_it_was_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # Pytest's own are there only while the test itself runs.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.configure("text", "%(levelname)s: %(message)s")
    logging.getLogger("x").info("hello")
    assert capsys.readouterr().err == "INFO: hello\n"
    assert logs.said("ready") == "drafthouse: ready"
    logs.configure("json", anew=True)
    logging.getLogger("x").info("hello")
    assert json.loads(capsys.readouterr().err)["message"] == "hello"
    said = json.loads(logs.said("failed", logging.ERROR))
    assert (said["logger"], said["level"], said["message"]) == ("drafthouse", "ERROR", "failed")
