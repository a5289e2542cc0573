"""Negative controls: a mistake in a manifest or a configuration is named, and so is its remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.config.file import load
from tests.support.k8s.operator_rules import operator_problems
from tests.support.k8s.placement import NodeShape, placement_problems
from tests.support.k8s.rendering import (
    REPOSITORY,
    container_of,
    groups,
    of_kind,
    only,
    rendered,
)
from tests.support.k8s.schemas import core_problems, rule_problems, schema_problems

Breakage = Callable[[Any], None]


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    """Of the base alone: the checks are on trial here, not the manifests."""
    return rendered(REPOSITORY / "k8s" / "base")


@pytest.fixture(scope="module")
def service(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(only("RayService", objects))


_NOTHING = object()


def _set(path: str, value: object) -> Breakage:
    """A breakage that sets one key, or takes it away; the path's `*` is any group of workers."""

    def break_it(manifest: Any) -> None:
        *way, last = path.split(".")
        node = manifest
        for part in way:
            node = node[0] if part == "*" else node.setdefault(part, {})
        node[last] = value
        if value is _NOTHING:
            del node[last]

    return break_it


def _variable(group: str, name: str, value: str) -> Breakage:
    def break_it(service: Any) -> None:
        environment: Any = container_of(groups(service)[group])["env"]
        environment.append({"name": name, "value": value})

    return break_it


def _both(*breakages: Breakage) -> Breakage:
    def break_it(manifest: Any) -> None:
        for each in breakages:
            each(manifest)

    return break_it


_CLUSTER = "spec.rayClusterConfig"
_HEAD, _GROUP = f"{_CLUSTER}.headGroupSpec", f"{_CLUSTER}.workerGroupSpecs.*"
_FIRST = f"{_GROUP}.template.spec.containers.*"
_OPTIONS = {
    "gatewayClassName": "istio",
    "stepSizePercent": 10,
    "maxSurgePercent": 20,
    "intervalSeconds": 5,
}


def _upgraded(**options: object) -> Breakage:
    """Not a mistake yet but for the options: upgrades, as their overlay sets them up."""
    wanted: dict[str, object] = {"type": "NewClusterWithIncrementalUpgrade"}
    wanted["clusterUpgradeOptions"] = {**_OPTIONS, **options}
    return _both(
        _set(f"{_CLUSTER}.enableInTreeAutoscaling", True), _set("spec.upgradeStrategy", wanted)
    )


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (_set(f"{_FIRST}.imagePullPolice", "Always"), "'imagePullPolice' was unexpected"),
        (_set(f"{_HEAD}.rayStartParams.num-cpus", 0), "0 is not of type 'string'"),
        (_set(f"{_HEAD}.template", _NOTHING), "'template' is a required property"),
        (_set("spec.managedBy", "somebody"), "must be either 'ray.io/kuberay-operator' or"),
    ],
)
def test_the_schema_and_its_rules_catch_a_broken_manifest(
    service: dict[str, Any], schema: dict[str, Any], breakage: Breakage, message: str
) -> None:
    broken = copy.deepcopy(service)
    breakage(broken)
    problems = [*schema_problems(broken, schema), *rule_problems(broken, schema)]
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (_set("metadata.name", "d" * 48), "use at most 47 small letters"),
        (_set("spec.upgradeStrategy.type", "Rolling"), "choose one"),
        (_upgraded(stepSizePercent=30), "set it from 0 to 20"),
        (_upgraded(intervalSeconds=0), "intervalSeconds: is missing or not above 0; set it"),
        (
            _both(_upgraded(), _set(f"{_CLUSTER}.enableInTreeAutoscaling", False)),
            "set enableInTreeAutoscaling: true",
        ),
        (_set(f"{_GROUP}.rayStartParams", {"labels": "a=b"}), "use the group's field `labels`"),
        (
            _both(
                _set(f"{_GROUP}.rayStartParams", {"num-cpus": "1"}),
                _set(f"{_GROUP}.resources", {"CPU": "1"}),
            ),
            "keep those in `resources`",
        ),
        (_set(f"{_GROUP}.maxReplicas", _NOTHING), "minReplicas and maxReplicas must be set"),
        (_set(f"{_GROUP}.replicas", 0), "replicas 0 is not from"),
        (_set(f"{_GROUP}.suspend", True), "suspend: the operator has rules for it; port them"),
        (_variable("head", "REDIS_USERNAME", "me"), "REDIS_USERNAME: the operator has rules"),
        (_set(f"{_CLUSTER}.rayVersion", ""), "set that of the image"),
        (_set(f"{_CLUSTER}.tlsOptions", {"enabled": True}), "feature gate RayClusterMTLS; turn it"),
        (_set(f"{_HEAD}.template.spec.containers.*.ports", []), "the Service lacks them; add them"),
        (_set(f"{_CLUSTER}.authOptions.mode", "disabled"), "set it to token"),
        (_variable("cpu", "RAY_AUTH_MODE", "disabled"), "overrules authOptions; remove it"),
    ],
)
def test_the_operators_rules_catch_a_broken_manifest(
    service: dict[str, Any], breakage: Breakage, message: str
) -> None:
    broken = copy.deepcopy(service)
    breakage(broken)
    (problem,) = operator_problems(broken)
    assert message in problem


@pytest.mark.parametrize(
    ("kind", "breakage", "message"),
    [
        ("NetworkPolicy", _set("spec.podSelectors", {}), "'podSelectors' was unexpected"),
        ("PodDisruptionBudget", _set("spec.minAvailable", [1]), "[1] is not"),
    ],
)
def test_the_schemas_of_kubernetes_catch_a_broken_object(
    objects: list[dict[str, Any]], kind: str, breakage: Breakage, message: str
) -> None:
    broken = copy.deepcopy(of_kind(kind, objects)[0])
    breakage(broken)
    (problem,) = core_problems(broken)
    assert message in problem


GPU_NODE = NodeShape("target", 1, {"CPU": 32, "GPU": 4, "target_slot": 4}, {"zone": "a"})
DRAFT_NODE = NodeShape("draft", 1, {"CPU": 16, "GPU": 4, "draft_slot": 4}, {"zone": "b"})


BARE = NodeShape("target", 1, {"CPU": 64, "GPU": 4}, {})
HALF = NodeShape("target", 2, {"CPU": 32, "GPU": 2, "target_slot": 4}, {})
SMALL = NodeShape("draft", 1, {"CPU": 16, "GPU": 2, "draft_slot": 4}, {})
FULL = [
    replace(GPU_NODE, capacity={**GPU_NODE.capacity, "CPU": 22}),
    replace(DRAFT_NODE, capacity={**DRAFT_NODE.capacity, "CPU": 10}),
]


@pytest.mark.parametrize(
    ("nodes", "override", "message"),
    [
        ([BARE, DRAFT_NODE], "", "target: no worker group offers target_slot"),
        # Ranks would span two of them.
        ([HALF, DRAFT_NODE], "", "target: no node has room"),
        ([GPU_NODE, SMALL], "", "drafters."),
        (
            [GPU_NODE, DRAFT_NODE],
            "coordinator.placement.labels={zone: c}",
            "coordinator: no worker group has the labels {'zone': 'c'}",
        ),
        (FULL, "", "coordinator: no node has room for one more, and it surges"),
        ([GPU_NODE, DRAFT_NODE], "", ""),
    ],
)
def test_the_placement_check_notices_what_does_not_fit(
    nodes: list[NodeShape], override: str, message: str
) -> None:
    path = REPOSITORY / "configs" / "llama-70b-8xh100.yaml"
    problems = placement_problems(load(path, [override] if override else []).config, nodes)
    assert any(problem.startswith(message) for problem in problems) == bool(message), problems
