"""A rollout that makes no sense is refused by name, with a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.parse import parse
from cluster.config.schema import Config
from cluster.errors import ConfigError

OLD = {"kind": "suffix"}
POOL = {"num_cpus": 1}
TAPE = {"kind": "recorder"}


def new(replaces: str = "old", **fields: Any) -> dict[str, Any]:
    return {"kind": "suffix", "rollout": {"replaces": replaces}, **fields}


def checked(drafters: dict[str, Any], **fields: Any) -> Config:
    config = parse(Config, {"target": {"engine": {"model": "m"}}, "drafters": drafters, **fields})
    config.check()
    return config


def test_a_rollout_inside_the_target_or_in_the_pool_is_taken() -> None:
    inside = checked({"old": OLD, "new": new()})
    assert inside.rollouts["new"].replaces == "old"
    assert inside.rollouts["new"].canary_share == 0.05
    in_pool = checked({"old": {**OLD, "placement": POOL}, "new": new(placement=POOL)})
    assert in_pool.pool == ("old", "new")


def test_a_recorder_is_no_stage_of_a_cascade() -> None:
    with pytest.raises(ConfigError, match="'tape' is a recorder, which drafts nothing"):
        checked({"tape": TAPE, "all": {"kind": "cascade", "options": {"stages": ["tape"]}}})


def test_a_candidate_stands_in_no_task() -> None:
    with pytest.raises(ConfigError, match="'new' takes the place of 'old' by itself"):
        checked({"old": OLD, "new": new()}, tasks={"code": ["old", "new"]})
