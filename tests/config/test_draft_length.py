"""The section of draft-length schedules: what it refuses, and what is gone."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.parse import parse
from cluster.config.schema import Config
from cluster.errors import ConfigError


def section(**fields: Any) -> dict[str, Any]:
    return {"target": {"engine": {"model": "m"}}, "coordinator": {"draft_length": fields}}


def override(**fields: Any) -> dict[str, Any]:
    return section(overrides=[{}, fields])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (section(kind="fast"), "draft_length.kind: 'fast' is none of: adaptive, constant"),
        (section(threshold=1.5), "draft_length.threshold: 1.5 is out of range"),
        (section(kind="alpha"), "draft_length.kind: 'alpha' is gone; the control loop leaves"),
        (section(stop_below=0.5), "draft_length.stop_below: this key is gone; the control loop"),
        (section(return_at=0.6), "draft_length.return_at: this key is gone; the control loop"),
        (section(time_zone="UTC"), "draft_length.time_zone: this key is gone; caps go by class"),
        (override(hours="09-18"), "overrides[1].hours: this key is gone; caps go by class"),
        (override(days="mon"), "overrides[1].days: this key is gone; caps go by class, task"),
        (override(load_from=-1), "overrides[1].load_from: -1 is out of range"),
        (override(latency_class="x"), "overrides[1].latency_class: unknown key (did you mean"),
        (
            override(**{"class": "urgent"}),
            "overrides[1].class: 'urgent' is no class; known are: throughput, interactive",
        ),
        (override(task="code"), "overrides[1].task: 'code' is no task; known are: default"),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Config, data).check()
    assert message in caught.value.message


def test_a_whole_section_is_read() -> None:
    rule = {"load_from": 8, "class": "interactive", "task": "default", "max_draft_tokens": 2}
    config = parse(Config, section(kind="window", overrides=[rule]))
    config.check()
    (found,) = config.coordinator.draft_length.overrides
    assert (found.latency_class, found.load_from, found.max_draft_tokens) == ("interactive", 8, 2)
