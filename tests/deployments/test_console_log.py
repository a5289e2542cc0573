"""Which lines of the replicas' logs reach the console, and that each does so once."""

import logging
from pathlib import Path

import pytest

from cluster.logs import JsonLines
from deployments.readiness import LogFollower, is_wanted

TIME = "2026-01-02 03:04:05,678"
REQUEST = f"INFO {TIME} deployments.ingress.tracing: request id=a task=default"
ACTIVITY = f"INFO {TIME} cluster.coordinator.moment: running 1 requests, waiting 0"


def as_json(level: str, logger: str) -> str:
    record = logging.LogRecord(logger, getattr(logging, level), "x", 1, "m", (), None)
    record.created = 0.0  # workers of pytest name the tests by their lines
    return JsonLines().format(record)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (REQUEST, True),
        (ACTIVITY, True),
        (f"WARNING {TIME} cluster.engine.device: slow", True),
        (f"ERROR {TIME} deployments.connections: refused", True),
        (f"INFO {TIME} cluster.coordinator.target_links: target joined", False),
        (f"DEBUG {TIME} cluster.coordinator.moment: x", False),
        (f"ERROR {TIME} ray.serve: x", False),
        ("INFO 2026 deployments", False),
        ("  File x, line 3", False),
        (as_json("INFO", "deployments.ingress.tracing"), True),
        (as_json("WARNING", "cluster.engine.device"), True),
        (as_json("INFO", "cluster.coordinator.target_links"), False),
        (as_json("ERROR", "ray.serve"), False),
        ("{no object", False),
    ],
)
def test_the_console_has_warnings_requests_and_activity(line: str, expected: bool):
    assert is_wanted(line) == expected


def test_every_line_is_told_once_and_when_it_is_whole(tmp_path: Path):
    follower = LogFollower(tmp_path)
    assert [*follower.new_lines(), *LogFollower(None).new_lines()] == []
    first, second = tmp_path / "worker-1.err", tmp_path / "worker-2.err"
    first.write_text(f"{REQUEST}\nnoise\n{ACTIVITY[:20]}")
    second.write_text(f"{REQUEST} again\n")
    (tmp_path / "raylet.err").write_text(f"{REQUEST}\n")
    assert [*follower.new_lines()] == [REQUEST, f"{REQUEST} again"]
    assert [*follower.new_lines()] == []
    with first.open("a") as file:
        file.write(f"{ACTIVITY[20:]}\n")
    assert [*follower.new_lines()] == [ACTIVITY]
    first.write_text(f"{ACTIVITY}\n")  # begun anew
    assert [*follower.new_lines()] == [ACTIVITY]


@pytest.mark.parametrize("is_json", [False, True])
def test_the_progress_of_loading_is_the_last_that_was_said(tmp_path: Path, is_json: bool):
    follower, file = LogFollower(tmp_path), tmp_path / "worker-1.err"
    assert follower.progress == ""
    loading = "cluster.engine.loading.progress"
    for logger, message, progress in (
        ("cluster.cpp", "phase build: native code of cpu", "phase build: native code of cpu"),
        (loading, "phase load: 1 of 4 MB of weights read", "phase load: 1 of 4 MB of weights read"),
        (loading, "phase profile", "phase profile"),
        ("cluster.cpp", "no native code of draft", "phase profile"),
    ):
        record = logging.LogRecord(logger, logging.INFO, "x", 1, message, (), None)
        line = JsonLines().format(record) if is_json else f"INFO {TIME} {logger}: {message}"
        with file.open("a") as lines:
            lines.write(f"{line}\n")
        assert [*follower.new_lines()] == []
        assert follower.progress == progress
