"""Checks a rendered RayService without a cluster: schema, operator's rules, placement."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from cluster.config.schema import Config, PlacementConfig

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMAS = REPOSITORY.parent / "shared" / "schemas"

# Folder of a kustomization and the Serve configuration that its RayService must carry.
MANIFESTS = {
    "base": ("k8s/base", "k8s/base/serve.yaml"),
    "8xh100": ("k8s/overlays/8xh100", "configs/llama-70b-8xh100.yaml"),
}


def rendered(folder: Path) -> list[dict[str, Any]]:
    """The objects that `kubectl apply -k folder` would send; needs no cluster."""
    output = subprocess.run(
        ["kubectl", "kustomize", str(folder)], check=True, capture_output=True, text=True
    ).stdout
    return [document for document in yaml.safe_load_all(output) if document]


def only(kind: str, objects: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The one object of that kind."""
    (found,) = (item for item in objects if item["kind"] == kind)
    return found


def strict_schema(definition: Mapping[str, Any], version: str = "v1") -> dict[str, Any]:
    """The JSON schema of one version of a CustomResourceDefinition, closed against unknown keys.

    The API server prunes unknown keys in silence; here they are errors.
    """
    (found,) = (item for item in definition["spec"]["versions"] if item["name"] == version)
    closed: dict[str, Any] = _closed(found["schema"]["openAPIV3Schema"])
    return closed


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _closed(value) for key, value in schema.items() if key != "properties"}
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return result
    result["properties"] = {name: _closed(value) for name, value in properties.items()}
    if not schema.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    # The API server fills defaults in before it looks for what is required.
    if isinstance(schema.get("required"), list):
        result["required"] = [name for name in schema["required"] if not _has_default(schema, name)]
    return result


def _has_default(schema: Mapping[str, Any], name: str) -> bool:
    return "default" in schema["properties"].get(name, {})


def schema_problems(manifest: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """Every deviation, as `path: what is wrong`."""
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def operator_problems(service: Mapping[str, Any]) -> list[str]:
    """What KubeRay's operator refuses although the schema lets it pass."""
    problems = []
    name = service["metadata"]["name"]
    if len(name) > 47 or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        problems.append(f"metadata.name: {name!r} is not a DNS-1035 name of at most 47 characters")
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster.get("workerGroupSpecs", [])}
    for group_name, group in groups.items():
        parameters = group.get("rayStartParams", {})
        if "labels" in parameters:
            problems.append(f"{group_name}: labels belong in the group's own field `labels`")
        if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(
            parameters
        ):
            problems.append(f"{group_name}: resources are set in two places")
        if group_name != "head":
            low, count, high = (group[key] for key in ("minReplicas", "replicas", "maxReplicas"))
            if not low <= count <= high:
                problems.append(f"{group_name}: {low} <= {count} <= {high} replicas does not hold")
    ports = {port["name"] for port in _container(cluster["headGroupSpec"])["ports"]}
    if not {"serve", "serve-grpc"} <= ports:
        problems.append("head: without the ports serve and serve-grpc the Service lacks them")
    return problems


def door_problems(service: Mapping[str, Any]) -> list[str]:
    """How a pod's Ray would run code for whoever reaches it; empty when it asks for a token."""
    cluster = service["spec"]["rayClusterConfig"]
    problems = []
    if cluster.get("authOptions", {}).get("mode") != "token":
        problems.append("authOptions.mode is not token")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for variable in _container(group).get("env", ()):
            if variable["name"].startswith("RAY_AUTH_"):
                problems.append(f"{variable['name']} overrules authOptions")
    return problems


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What each pod of one group offers to Ray."""

    group: str
    count: int
    capacity: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Demand:
    """What must stand on one node together: a replica, or all ranks of a target replica."""

    path: str
    amounts: Mapping[str, float]
    labels: Mapping[str, str]


def node_shapes(service: Mapping[str, Any]) -> list[NodeShape]:
    """The worker groups of a RayService as Ray will see their nodes."""
    shapes = []
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        limits = _container(group)["resources"]["limits"]
        capacity = {"CPU": math.ceil(_quantity(limits["cpu"]))}
        if "nvidia.com/gpu" in limits:
            capacity["GPU"] = _quantity(limits["nvidia.com/gpu"])
        capacity |= {name: _quantity(value) for name, value in group.get("resources", {}).items()}
        # KubeRay tells every pod its group, and Ray makes that a label of the node.
        labels = {"ray.io/node-group": group["groupName"], **group.get("labels", {})}
        shapes.append(NodeShape(group["groupName"], group["replicas"], capacity, labels))
    return shapes


def _container(group: Mapping[str, Any]) -> Mapping[str, Any]:
    container: Mapping[str, Any] = group["template"]["spec"]["containers"][0]
    return container


def _quantity(text: object) -> float:
    value = str(text)
    return float(value[:-1]) / 1000 if value.endswith("m") else float(value)


def demands(config: Config) -> list[Demand]:
    """Everything the application reserves, the largest pieces first."""
    ranks = config.target.engine.tensor_parallel
    found = [_demand("target", config.target.placement, ranks)] * config.target.replicas
    for name in config.pool:
        drafter = config.drafters[name]
        found += [_demand(f"drafters.{name}", drafter.reserved)] * drafter.replicas
    found += [_demand("coordinator", config.coordinator.placement)] * config.coordinator.replicas
    found += [_demand("ingress", config.ingress.placement)] * config.ingress.replicas
    return found


def _demand(path: str, placement: PlacementConfig, count: int = 1) -> Demand:
    wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    amounts = {name: amount * count for name, amount in wanted.items() if amount > 0}
    return Demand(path, amounts, placement.labels)


def placement_problems(config: Config, shapes: Sequence[NodeShape]) -> list[str]:
    """Why `config` cannot be placed on these nodes, first fit; empty when it can."""
    free = [(shape, dict(shape.capacity)) for shape in shapes for _ in range(shape.count)]
    problems = []
    for demand in demands(config):
        labelled = [node for node in free if demand.labels.items() <= node[0].labels.items()]
        if not labelled:
            problems.append(f"{demand.path}: no worker group has the labels {demand.labels}")
            continue
        for name in demand.amounts:
            if not any(name in shape.capacity for shape, _ in labelled):
                problems.append(f"{demand.path}: no worker group offers {name}")
        place = next((node for _, node in labelled if _fits(demand, node)), None)
        if place is None:
            problems.append(f"{demand.path}: no node has room for {dict(demand.amounts)}")
            continue
        for name, amount in demand.amounts.items():
            place[name] -= amount
    return problems


def _fits(demand: Demand, node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount - 1e-9 for name, amount in demand.amounts.items())
