"""Negative controls: the checks of the manifests mean something only if a broken one fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from cluster.config.file import load
from cluster.config.schema import Config
from tests.support.manifests import (
    REPOSITORY,
    NodeShape,
    door_problems,
    operator_problems,
    placement_problems,
    schema_problems,
)

Breakage = Callable[[dict[str, Any]], None]


def _unknown_key(service: dict[str, Any]) -> None:
    service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []


def _unknown_key_in_a_pod(service: dict[str, Any]) -> None:
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"


def _wrong_type(service: dict[str, Any]) -> None:
    service["spec"]["rayClusterDeletionDelaySeconds"] = "900"


def _number_where_text_belongs(service: dict[str, Any]) -> None:
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def _required_key_missing(service: dict[str, Any]) -> None:
    del service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]


def _value_outside_the_enumeration(service: dict[str, Any]) -> None:
    service["spec"]["rayClusterConfig"]["authOptions"]["mode"] = "tokens"


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (_unknown_key, "'workerGroupSpec' was unexpected"),
        (_unknown_key_in_a_pod, "'imagePullPolice' was unexpected"),
        (_wrong_type, "rayClusterDeletionDelaySeconds: '900' is not of type 'integer'"),
        (_number_where_text_belongs, "0 is not of type 'string'"),
        (_required_key_missing, "'template' is a required property"),
        (_value_outside_the_enumeration, "'tokens' is not one of"),
    ],
)
def test_the_schema_check_catches_a_broken_manifest(
    service: dict[str, Any], schema: dict[str, Any], breakage: Breakage, message: str
) -> None:
    broken = copy.deepcopy(service)
    breakage(broken)
    problems = schema_problems(broken, schema)
    assert any(message in problem for problem in problems), problems


def _long_name(service: dict[str, Any]) -> None:
    service["metadata"]["name"] = "d" * 48


def _labels_as_start_parameter(service: dict[str, Any]) -> None:
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group["rayStartParams"] = {"labels": "a=b"}


def _resources_in_two_places(service: dict[str, Any]) -> None:
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group["rayStartParams"] = {"num-cpus": "1"}
    group["resources"] = {"CPU": "1"}


def _too_few_replicas(service: dict[str, Any]) -> None:
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = 0


def _no_serve_ports(service: dict[str, Any]) -> None:
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    head["template"]["spec"]["containers"][0]["ports"] = []


@pytest.mark.parametrize(
    "breakage",
    [
        _long_name,
        _labels_as_start_parameter,
        _resources_in_two_places,
        _too_few_replicas,
        _no_serve_ports,
    ],
)
def test_the_operator_check_catches_a_broken_manifest(
    service: dict[str, Any], breakage: Breakage
) -> None:
    broken = copy.deepcopy(service)
    breakage(broken)
    assert len(operator_problems(broken)) == 1


def _no_token(service: dict[str, Any]) -> None:
    service["spec"]["rayClusterConfig"]["authOptions"]["mode"] = "disabled"


def _mode_unsaid(service: dict[str, Any]) -> None:
    del service["spec"]["rayClusterConfig"]["authOptions"]


def _mode_overruled_in_a_pod(service: dict[str, Any]) -> None:
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    environment = group["template"]["spec"]["containers"][0]["env"]
    environment.append({"name": "RAY_AUTH_MODE", "value": "disabled"})


@pytest.mark.parametrize("breakage", [_no_token, _mode_unsaid, _mode_overruled_in_a_pod])
def test_the_check_of_tokens_catches_an_open_ray(
    service: dict[str, Any], breakage: Breakage
) -> None:
    broken = copy.deepcopy(service)
    breakage(broken)
    assert len(door_problems(broken)) == 1


GPU_NODE = NodeShape("target", 1, {"CPU": 32, "GPU": 4, "target_slot": 4}, {"zone": "a"})
DRAFT_NODE = NodeShape("draft", 1, {"CPU": 16, "GPU": 4, "draft_slot": 4}, {"zone": "b"})


@pytest.fixture(scope="module")
def large() -> Config:
    return load(REPOSITORY / "configs" / "llama-70b-8xh100.yaml").config


def test_the_placement_check_accepts_what_fits(large: Config) -> None:
    assert placement_problems(large, [GPU_NODE, DRAFT_NODE]) == []


def test_the_placement_check_notices_a_missing_resource(large: Config) -> None:
    bare = NodeShape("target", 1, {"CPU": 64, "GPU": 4}, {})
    problems = placement_problems(large, [bare, DRAFT_NODE])
    assert "target: no worker group offers target_slot" in problems


def test_the_placement_check_notices_ranks_that_would_span_two_nodes(large: Config) -> None:
    half = NodeShape("target", 2, {"CPU": 32, "GPU": 2, "target_slot": 4}, {})
    problems = placement_problems(large, [half, DRAFT_NODE])
    assert any(problem.startswith("target: no node has room") for problem in problems)


def test_the_placement_check_notices_too_many_drafters(large: Config) -> None:
    small = NodeShape("draft", 1, {"CPU": 16, "GPU": 2, "draft_slot": 4}, {})
    problems = placement_problems(large, [GPU_NODE, small])
    assert any(problem.startswith("drafters.") for problem in problems)


def test_the_placement_check_notices_a_label_that_no_group_has() -> None:
    config = load(
        REPOSITORY / "configs" / "llama-70b-8xh100.yaml", ["coordinator.placement.labels={zone: c}"]
    ).config
    problems = placement_problems(config, [GPU_NODE, DRAFT_NODE])
    assert set(problems) == {"coordinator: no worker group has the labels {'zone': 'c'}"}
