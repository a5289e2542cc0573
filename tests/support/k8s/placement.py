"""Whether what a configuration reserves fits the worker groups of a RayService."""

import math
from collections.abc import Mapping, Sequence

from cluster.config.schema import Config
from cluster.records import frozen
from deployments.placement import placed
from tests.support.k8s.rendering import Manifest, container_of, groups


@frozen
class NodeShape:
    """A worker group: what each of its pods offers to Ray."""

    group: str
    count: int
    capacity: Mapping[str, float]
    labels: Mapping[str, str]


@frozen
class Demand:
    """All that must stand on one node together: a replica, or all ranks of a target replica.

    surges: in an update one more stands beside the others.
    """

    path: str
    amounts: Mapping[str, float]
    labels: Mapping[str, str]
    surges: bool


def node_shapes(service: Manifest) -> list[NodeShape]:
    """Return the worker groups of a RayService as Ray will see their nodes."""
    shapes = []
    for name, group in groups(service).items():
        if name == "head":
            continue
        limits = container_of(group)["resources"]["limits"]
        capacity = {"CPU": math.ceil(_quantity(limits["cpu"]))}
        if "nvidia.com/gpu" in limits:
            capacity["GPU"] = _quantity(limits["nvidia.com/gpu"])
        capacity |= {key: _quantity(value) for key, value in group.get("resources", {}).items()}
        # KubeRay tells every pod its group, and Ray makes that a label of the node.
        labels = {"ray.io/node-group": name, **group.get("labels", {})}
        shapes.append(NodeShape(name, group["replicas"], capacity, labels))
    return shapes


def _quantity(text: object) -> float:
    value = str(text)
    return float(value[:-1]) / 1000 if value.endswith("m") else float(value)


def demands(config: Config) -> list[Demand]:
    """Return all that the application reserves, the largest pieces first."""
    found: list[Demand] = []
    for each in placed(config).values():
        surges = each.options()["max_surge_percent"] > 0
        path = each.key.removesuffix(".placement")
        found += [Demand(path, each.reserves, each.placement.labels, surges)] * each.replicas
    return sorted(found, key=lambda each: sum(each.amounts.values()), reverse=True)


def placement_problems(config: Config, shapes: Sequence[NodeShape]) -> list[str]:
    """Return why `config` cannot be placed on these nodes, first fit; nothing when it can."""
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
    for demand in {each.path: each for each in demands(config) if each.surges}.values():
        labelled = [node for node in free if demand.labels.items() <= node[0].labels.items()]
        if labelled and not any(_fits(demand, node) for _, node in labelled):
            problems.append(f"{demand.path}: no node has room for one more, and it surges")
    return problems


def _fits(demand: Demand, node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount - 1e-9 for name, amount in demand.amounts.items())
