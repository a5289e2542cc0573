"""The file of `coordinator.policy`: what it may say, and which rule holds for a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.policy import NO_RULE, PolicyRule, read_policy
from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig
from cluster.errors import ConfigError

CONFIG = Config(
    drafters={name: DrafterConfig(kind="suffix") for name in ("lm", "suffix")},
    tasks={"code": ("lm", "suffix")},
)


def with_policy(folder: Path, text: str) -> Config:
    path = folder / "policy.yaml"
    path.write_text(text)
    return replace(CONFIG, coordinator=CoordinatorConfig(policy=str(path)))


def test_the_first_rule_that_fits_holds_and_yaml_may_say_on_and_off(tmp_path: Path) -> None:
    policy = read_policy(
        with_policy(
            tmp_path,
            """
rules:
  - {task: code, law: greedy, drafts: on, drafters: [suffix]}
  - {task: code, segment: trial, drafts: measure}
  - {task: code, drafts: off}
  - {segment: trial, drafts: "off"}
""",
        )
    )
    first, second, third, fourth = policy.rules
    assert first == PolicyRule("code", law="greedy", drafts="on", drafters=("suffix",))
    assert third.drafts == fourth.drafts == "off"
    assert policy.rule_for("code", "trial", "greedy") is first
    assert policy.rule_for("code", "trial", "sampled") is second
    assert policy.rule_for("code", "", "sampled") is third
    assert policy.rule_for("default", "trial", "greedy") is fourth
    assert policy.rule_for("default", "", "greedy") is NO_RULE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rules: [{task: cod}]", r"policy\.yaml: rules\[0\]\.task: 'cod' is not .*mean code\?"),
        ("rules: [{}, {drafters: [suffx]}]", r"rules\[1\]\.drafters: 'suffx' .*mean suffix\?"),
        ("rules: [{drafts: maybe}]", r"rules\[0\]\.drafts: 'maybe' is none of: on, measure, off"),
        ("rules: [{law: true}]", r"rules\[0\]\.law: True is none of"),
        ("rule: []", "did you mean rules"),
        ("- a", "is not a mapping; see docs/policy.md"),
    ],
)
def test_anything_else_is_refused_by_file_and_place(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_policy(with_policy(tmp_path, text))
