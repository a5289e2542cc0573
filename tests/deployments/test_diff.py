"""`drafthouse diff`: what a change restarts, as Ray Serve itself would decide."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.config.file import load
from cluster.errors import ConfigError
from deployments.cli import EXIT_BAD_CONFIG, EXIT_OK, main
from deployments.diff import difference

Document = dict[str, Any]

_BASE = Path(__file__).resolve().parents[2] / "k8s" / "base" / "serve.yaml"
_ALL = "restarts all of application drafthouse: coordinator, ingress, target"
_POOL = (
    "restarts all of application drafthouse-pool: drafter-code, drafter-lm, drafter-ngram, "
    "drafter-prose, drafter-suffix"
)


@pytest.fixture
def document() -> Document:
    return copy.deepcopy(dict(load(_BASE).document))


def after(document: Document, change: Callable[[Document, Document], object]) -> str:
    """The difference that `change` makes to the document and its application."""
    new = copy.deepcopy(document)
    change(new, new["applications"][0])
    return difference(document, new)


def _deployments(**options: object) -> list[Document]:
    return [{"name": "target", **options}]


@pytest.mark.parametrize(
    ("change", "price", "line"),
    [
        (
            lambda _, app: app["args"]["ingress"].update(max_choices=8),
            _ALL,
            "ingress.max_choices: (absent) -> 8 (live in the user_config of ingress)",
        ),
        (
            lambda _, app: app["args"]["target"]["engine"].update(threads=2),
            _ALL,
            "target.engine.threads: 1 -> 2",
        ),
        (
            lambda _, app: app.update(runtime_env={"env_vars": {"A": "1"}}),
            _ALL,
            "applications[drafthouse].runtime_env: (absent) -> {env_vars: {A: '1'}}",
        ),
        (
            lambda _, app: app.update(deployments=_deployments(user_config={"adapters": {}})),
            "live: target takes it and nothing restarts",
            "user_config: (absent) -> {adapters: {}}",
        ),
        (
            lambda _, app: app.update(deployments=_deployments(num_replicas=2)),
            "live: target takes it and nothing restarts",
            "deployments[target].num_replicas: (absent) -> 2",
        ),
        (
            lambda _, app: app.update(deployments=_deployments(ray_actor_options={"num_cpus": 0})),
            "restarts target alone",
            "deployments[target].ray_actor_options: (absent) -> {num_cpus: 0}",
        ),
        (
            lambda _, app: app.update(external_scaler_enabled=True),
            "reaches no process",
            "applications[drafthouse].external_scaler_enabled: (absent) -> true",
        ),
        (
            lambda all_, _: all_["http_options"].update(port=8001),
            "ignored until Serve is shut down and started anew, which restarts everything",
            "http_options.port: 8000 -> 8001",
        ),
        (
            lambda all_, _: all_.update(logging_config={"log_level": "DEBUG"}),
            "live: Serve itself takes it and nothing restarts",
            "logging_config: (absent) -> {log_level: DEBUG}",
        ),
    ],
)
def test_a_changed_key_is_told_with_what_it_restarts(
    document: Document, change: Callable[[Document, Document], object], price: str, line: str
) -> None:
    assert after(document, change) == f"{price}\n  {line}\n"


def test_equal_files_restart_nothing(document: Document) -> None:
    assert difference(document, copy.deepcopy(document)) == "the files mean the same\n"


def test_replicas_are_not_told_that_a_user_config_is_gone(document: Document) -> None:
    adapted = copy.deepcopy(document)
    adapted["applications"][0]["deployments"] = _deployments(user_config={"adapters": {"a": "/b"}})
    found = difference(adapted, document)
    assert found.startswith("not taken back before target restarts; write user_config: {} instead")
    # The remedy is one.
    emptied = copy.deepcopy(document)
    emptied["applications"][0]["deployments"] = _deployments(user_config={})
    assert difference(adapted, emptied).startswith("live: target takes it")


def test_keys_that_exclude_each_other_are_told_with_what_they_cost_together(
    document: Document,
) -> None:
    spread = copy.deepcopy(document)
    ingress = {"name": "ingress"}
    document["applications"][0]["deployments"] = [{**ingress, "max_replicas_per_node": 1}]
    grouped = {**ingress, "placement_group_bundles": [{"CPU": 1}]}
    spread["applications"][0]["deployments"] = [grouped]
    (price, *lines) = difference(document, spread).splitlines()
    assert price == "restarts ingress alone"
    assert [line.split(": ")[0] for line in lines] == [
        "  deployments[ingress].max_replicas_per_node",
        "  deployments[ingress].placement_group_bundles",
    ]


def test_the_first_autoscaling_of_a_deployment_restarts_all(document: Document) -> None:
    """For Serve it is a part of the application's version."""
    scaled = _deployments(autoscaling_config={"max_replicas": 3})
    assert after(document, lambda _, app: app.update(deployments=scaled)).startswith(_ALL)
    document["applications"][0]["deployments"] = scaled
    more = _deployments(autoscaling_config={"max_replicas": 4})
    found = after(document, lambda _, app: app.update(deployments=more))
    assert found.startswith("live: target takes it")


def test_the_price_of_a_drafter_is_live(document: Document) -> None:
    dearer = [{"name": "drafter-lm", "user_config": {"price": 20}}]
    found = after(document, lambda file, _: file["applications"][1].update(deployments=dearer))
    assert found.startswith("live: drafter-lm takes it")


def test_what_serve_does_not_take_is_refused_with_its_reason(document: Document) -> None:
    wrong = copy.deepcopy(document)
    options = {"ray_actor_options": {"num_cpus": 64}}  # more than the target's bundle
    wrong["applications"][0]["deployments"] = _deployments(**options)
    with pytest.raises(ConfigError, match=r"Serve does not take it: .*bundle only has 1\.0 `CPU`"):
        difference(document, wrong)


def test_a_key_that_says_its_default_restarts_all_the_same(document: Document) -> None:
    """Serve compares what is written, not what it means."""
    found = after(document, lambda _, app: app["args"]["ingress"].update(replicas=1))
    assert found.startswith(_ALL)


def test_a_new_drafter_is_among_those_that_start(document: Document) -> None:
    added = {"kind": "prompt_lookup", "placement": {"num_cpus": 1}}
    found = after(document, lambda _, app: app["args"]["drafters"].update(extra=added))
    assert "drafter-extra" in found.splitlines()[0]


def test_what_stands_in_another_application_is_not_touched(document: Document) -> None:
    other = copy.deepcopy(document["applications"][0])
    other |= {"name": "other", "route_prefix": "/other"}
    document["applications"].append(other)
    found = after(document, lambda all_, _: all_["applications"][2]["args"].update(tasks={}))
    (price, *lines) = found.splitlines()
    assert price.startswith("restarts all of application other:")
    live = "(live in the user_config of ingress, coordinator)"
    assert lines == [
        f"  tasks.default: [lm, suffix, ngram] -> (absent) {live}",
        f"  tasks.code: [code, suffix, ngram] -> (absent) {live}",
        f"  tasks.prose: [prose, suffix, ngram] -> (absent) {live}",
    ]


def test_an_edit_of_the_drafters_restarts_their_application_alone(document: Document) -> None:
    def change(all_: Document, _: Document) -> None:
        drafters = all_["applications"][1]["args"]["drafters"]
        drafters["lm"]["max_nodes"] = 8
        drafters["ngram"]["placement"]["num_cpus"] = 0.2

    assert after(document, change).splitlines() == [
        _POOL,
        "  drafters.lm.max_nodes: (absent) -> 8 "
        "(live in the user_config of drafter-lm, as max_nodes)",
        "  drafters.ngram.placement.num_cpus: 0.1 -> 0.2",
    ]


def test_what_several_deployments_are_told_alike_is_one_change(document: Document) -> None:
    def told(weight: float, budget: str) -> list[Document]:
        classes = {"latency_classes": {"batch": weight}}
        live = {"tasks": {"code": ["lm"]}, "coordinator": {**classes, "budget": budget}}
        return [
            {"name": name, "user_config": live} for name in ("ingress", "coordinator", "target")
        ]

    document["applications"][0]["deployments"] = told(1.0, "fixed")
    found = after(document, lambda _, app: app.update(deployments=told(0.5, "adaptive")))
    assert found.splitlines() == [
        "live: coordinator, ingress, target take it and nothing restarts",
        "  user_config.coordinator.latency_classes.batch: 1.0 -> 0.5",
        "  user_config.coordinator.budget: fixed -> adaptive",
    ]
    pool = [{"name": "drafter-lm", "user_config": {"max_nodes": 4}}]
    found = after(document, lambda all_, _: all_["applications"][1].update(deployments=pool))
    assert found.splitlines() == [
        "live: drafter-lm takes it and nothing restarts",
        "  user_config: (absent) -> {max_nodes: 4}",
    ]


def test_the_dearest_changes_come_first(document: Document) -> None:
    def change(all_: Document, application: Document) -> None:
        all_["logging_config"] = {"log_level": "DEBUG"}
        application["deployments"] = _deployments(user_config={"adapters": {"a": "/b"}})
        application["args"]["model_name"] = "other"
        all_["http_options"]["port"] = 8001

    found = after(document, change)
    places = [found.index(word) for word in ("ignored until", "restarts all", "live: target")]
    assert places == sorted(places)
    assert found.count("\n\n") == 3


def test_the_command_compares_two_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(_BASE.parents[2])
    local = "configs/tiny.yaml"
    text = Path(local).read_text("utf-8")
    new = tmp_path / "new.yaml"
    new.write_text(text.replace("max_running_sequences: 64", "max_running_sequences: 32"))
    assert main(["diff", local, str(new)]) == EXIT_OK
    found = capsys.readouterr().out
    assert found.startswith("restarts all of application drafthouse: ")
    assert "  target.engine.max_running_sequences: 64 -> 32\n" in found
    new.write_text(text.replace("max_running_sequences", "max_running_sequence"))
    assert main(["diff", local, str(new)]) == EXIT_BAD_CONFIG
    assert "did you mean max_running_sequences?" in capsys.readouterr().err
