"""How the benchmark of starts names processes and sums up."""

from __future__ import annotations

import pytest

from benchmarks.rounds.start import name_of, summary


@pytest.mark.parametrize(
    ("command_line", "name"),
    [
        ("ray::ServeReplica:drafthouse:drafter-ngram", "drafter-ngram"),
        ("ray::ServeController", "ServeController"),
        ("python -u ray/dashboard/dashboard.py --host=127.0.0.1", "dashboard/dashboard"),
        ("ray/core/src/ray/gcs/gcs_server --log_dir=/tmp", "gcs_server"),
        ("python -m deployments.guard 12 /tmp/x", "deployments.guard"),
        ("sleep 1", "others"),
    ],
)
def test_a_process_is_called_by_what_it_does(command_line: str, name: str) -> None:
    assert name_of(command_line) == name


def test_several_starts_are_told_by_extremes_and_medians() -> None:
    starts = [
        {"first_token_s": wall, "cpu_s": cpu, "processes": {"target": cpu}}
        for wall, cpu in ((3.0, 5.0), (1.0, 9.0), (2.0, 7.0))
    ]
    found = summary(starts)
    assert (found["starts"], found["first_token_s"]) == (3, [1.0, 2.0, 3.0])
    assert found["cpu_s_by_process"] == {"target": 7.0}
