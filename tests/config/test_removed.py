"""Keys that are gone are refused by name, with what stands in their place."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cluster.config.file import load
from cluster.config.proof import SwitchbackConfig
from cluster.config.schema import AnswersConfig, CoordinatorConfig
from cluster.errors import ConfigError

NO_WAIT = "a target's steps wait for no drafter, so remove it"
NO_KIND = "no text waits for others of its kind, so remove it"
ALL_PRICED = "the control loop prices drafts in every step, so remove it"
WINDOWS = "windows measure without the bias of shared batches; set period_s"
NO_COHORT = "a target goes from step to step by itself, so remove it"
NO_BLOCKS = "rejection accepts as many drafts, so name that"
ONE_LIBRARY = "llguidance compiles all grammars, so remove it"
REMOVED = {
    "answers.grammar_backend": ("xgrammar", ONE_LIBRARY),
    "coordinator.max_draft_wait_ms": ("2.0", NO_WAIT),
    "coordinator.max_homogeneity_wait_ms": ("0.5", NO_KIND),
    "coordinator.policy": ("policy.yaml", ALL_PRICED),
    "coordinator.switchback.request_share": ("0.1", WINDOWS),
    "coordinator.cohorts": ("two", NO_COHORT),
    "coordinator.laws=block": ("[coupled, block]", NO_BLOCKS),
    "infer_tasks": ("true", "requests name their task in metadata.task, so remove it"),
    "coordinator.min_tokens_per_s": (
        "60",
        "remove it, and weigh requests by coordinator.latency_classes",
    ),
}


@pytest.mark.parametrize("entry", REMOVED)
def test_a_key_or_value_that_is_gone_says_what_to_do_in_a_file_and_as_an_override(
    tmp_path: Path, entry: str
) -> None:
    value, remedy = REMOVED[entry]
    key, _, gone = entry.partition("=")
    what = repr(gone) if gone else "this key"
    *sections, last = key.split(".")
    section = "".join(f"{each}: {{" for each in sections) + f"{last}: {value}" + "}" * len(sections)
    path, overrides = tmp_path / "serve.yaml", list[str]()
    for rest in (f", {section}", ""):
        path.write_text(f"applications:\n- args: {{target: {{engine: {{model: m}}}}{rest}}}")
        with pytest.raises(ConfigError) as caught:
            load(path, overrides)
        assert caught.value.message == f"{path}: {key}: {what} is gone; {remedy}"
        assert caught.value.param == key
        overrides = [f"{key}={value}"]


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("answers", AnswersConfig),
        ("coordinator", CoordinatorConfig),
        ("coordinator.switchback", SwitchbackConfig),
    ],
)
def test_a_key_that_is_gone_is_no_key_of_the_schema(section: str, kind: Any) -> None:
    assert {f"{section}.{key}" for key in kind.REMOVED} == {
        key for key in REMOVED if key.rpartition(".")[0] == section
    }
    assert not set(kind.REMOVED) & {field.name for field in dataclasses.fields(kind)}
