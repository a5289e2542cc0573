"""The section of draft-length schedules: what it refuses, and what is gone."""

from __future__ import annotations

from typing import Any

from cluster.config.parse import parse
from cluster.config.schema import Config


def section(**fields: Any) -> dict[str, Any]:
    return {"target": {"engine": {"model": "m"}}, "coordinator": {"draft_length": fields}}


def test_a_whole_section_is_read() -> None:
    rule = {"load_from": 8, "class": "interactive", "task": "default", "max_draft_tokens": 2}
    config = parse(Config, section(kind="window", overrides=[rule]))
    config.check()
    (found,) = config.coordinator.draft_length.overrides
    assert (found.latency_class, found.load_from, found.max_draft_tokens) == ("interactive", 8, 2)
