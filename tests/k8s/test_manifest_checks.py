"""Negative controls: a mistake in a manifest or a configuration is named, and so is its remedy."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config.file import load
from tests.support.k8s.operator_rules import operator_problems
from tests.support.k8s.placement import NodeShape, placement_problems
from tests.support.k8s.rendering import Manifest, Objects, of_kind, rendered
from tests.support.k8s.schemas import core_problems, rule_problems, schema_problems

BROKEN = yaml.safe_load(Path(__file__).with_name("broken.yaml").read_text("utf-8"))


@pytest.fixture(scope="module")
def objects() -> Objects:
    """Of the base alone: the checks are on trial here, not the manifests."""
    return rendered("k8s/base")


def broken(case: Any, kind: str, objects: Objects) -> Manifest:
    """The first object of the kind, with the mistakes of a case."""
    manifest = copy.deepcopy(of_kind(kind, objects)[0])
    for path, value in case["set"].items():
        *way, last = path.split(".")
        node = manifest
        for part in way:
            node = node[0] if part == "*" else node.setdefault(part, {})
        node[last] = value
        if value == "removed":
            del node[last]
    return manifest


def told(case: Any) -> str:
    return case["told"]


@pytest.mark.parametrize("case", BROKEN["schema"], ids=told)
def test_the_schema_and_its_rules_catch_a_broken_manifest(
    objects: Objects, schema: Manifest, case: Any
):
    manifest = broken(case, "RayService", objects)
    problems = [*schema_problems(manifest, schema), *rule_problems(manifest, schema)]
    assert any(case["told"] in problem for problem in problems), problems


@pytest.mark.parametrize("case", BROKEN["operator"], ids=told)
def test_the_operators_rules_catch_a_broken_manifest(objects: Objects, case: Any):
    (problem,) = operator_problems(broken(case, "RayService", objects))
    assert case["told"] in problem


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget"])
def test_the_schemas_of_kubernetes_catch_a_broken_object(objects: Objects, kind: str):
    for case in BROKEN[kind]:
        (problem,) = core_problems(broken(case, kind, objects))
        assert case["told"] in problem


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
):
    path = "configs/llama-70b-8xh100.yaml"
    problems = placement_problems(load(path, [override] if override else []).config, nodes)
    assert any(problem.startswith(message) for problem in problems) == bool(message), problems
