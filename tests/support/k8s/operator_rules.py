"""What KubeRay 1.7 refuses although its schema lets it pass: the operator's own validation, ported.

Source: ray-operator/controllers/ray/utils/validation.go at v1.7.0, as far as it is about a
RayService and what our manifests say; what has rules that are not ported is a problem itself.
Every problem is `path: what is wrong; the remedy`.  The last rules are ours.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.k8s.rendering import Manifest, container_of, groups

Rule = Callable[[Manifest], Iterator[str]]

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME_LEN = 47
_STRATEGIES = ("None", "NewCluster", "NewClusterWithIncrementalUpgrade")
_TOKEN_SINCE = (2, 52)
_EXPLICIT_RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}


def operator_problems(service: Manifest, *, has_mtls: bool = False) -> list[str]:
    """Return what the operator would refuse.  has_mtls: its feature gate RayClusterMTLS is on."""
    problems = [problem for rule in _RULES for problem in rule(service)]
    if "tlsOptions" in _cluster(service) and not has_mtls:
        problems.append("tlsOptions: needs the operator's feature gate RayClusterMTLS; turn it on")
    return problems


# Keys and variables of which the operator refuses some uses, and of which no manifest has any.
_UNPORTED = {
    *("priority", "suspend", "restartPolicy", "headService", "networkPolicy", "backend"),
    *("historyServerOptions", "enableK8sTokenAuth", "redis-username", "redis-password"),
    *("REDIS_USERNAME", "REDIS_PASSWORD", "RAY_REDIS_ADDRESS", "RAY_enable_autoscaler_v2"),
    *("KUBERAY_GEN_AUTOSCALER_START_CMD", "ray.io/initializing-timeout", "ray.io/ft-enabled"),
    "ray.io/external-storage-namespace",
}


def _cluster(service: Manifest) -> Manifest:
    return service["spec"]["rayClusterConfig"]


def _variables(group: Manifest) -> set[str]:
    return {each["name"] for each in container_of(group).get("env", ())}


def _metadata(service: Manifest) -> Iterator[str]:
    name = service["metadata"]["name"]
    if len(name) > _MAX_NAME_LEN or not _NAME.fullmatch(name):
        yield (
            f"metadata.name: {name!r} is no name of a Service; use at most {_MAX_NAME_LEN} small "
            "letters, digits and '-', a letter first"
        )
    for said in sorted(_UNPORTED.intersection(_said(service))):
        yield f"{said}: the operator has rules for it; port them, or leave it out"


def _said(node: Any) -> Iterator[str]:
    """All keys, and the names of all variables."""
    if isinstance(node, dict):
        yield from (*node, str(node.get("name")))
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from _said(each)


def _upgrades(service: Manifest) -> Iterator[str]:
    strategy, path = service["spec"].get("upgradeStrategy", {}), "spec.upgradeStrategy"
    kind = strategy.get("type", "NewCluster")
    if kind not in _STRATEGIES:
        yield f"{path}.type: {kind!r} is none of {', '.join(_STRATEGIES)}; choose one"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    if not _cluster(service).get("enableInTreeAutoscaling"):
        yield f"{path}.type: {kind} needs an autoscaler; set enableInTreeAutoscaling: true"
    options, path = strategy.get("clusterUpgradeOptions", {}), f"{path}.clusterUpgradeOptions"
    surge = options.get("maxSurgePercent", 100)
    if not 0 <= options.get("stepSizePercent", -1) <= surge <= 100:
        yield f"{path}.stepSizePercent: is missing or above the surge; set it from 0 to {surge}"
    if options.get("intervalSeconds", 0) <= 0:
        yield f"{path}.intervalSeconds: is missing or not above 0; set it"
    if not options.get("gatewayClassName"):
        yield f"{path}.gatewayClassName: is missing; name the class of your gateways"


def _group(service: Manifest) -> Iterator[str]:
    for name, group in groups(service).items():
        parameters = group.get("rayStartParams", {})
        if group.get("resources") and _EXPLICIT_RESOURCES & set(parameters):
            yield f"{name}: resources are set in two places; keep those in `resources`"
        if "labels" in parameters:
            yield f"{name}.rayStartParams.labels: is refused; use the group's field `labels`"


def _replicas(service: Manifest) -> Iterator[str]:
    is_scaled = _cluster(service).get("enableInTreeAutoscaling", False)
    for name, group in groups(service).items():
        if name == "head":
            continue
        low, high = group.get("minReplicas"), group.get("maxReplicas")
        if not is_scaled and None in (low, high):
            yield f"{name}: without an autoscaler minReplicas and maxReplicas must be set; set them"
        # The operator starts other numbers than these in silence.
        elif not (low or 0) <= group.get("replicas", 0) <= (math.inf if high is None else high):
            yield f"{name}: replicas {group.get('replicas')} is not from {low} to {high}; move it"


def _authentication(service: Manifest) -> Iterator[str]:
    version = re.match(r"(\d+)\.(\d+)", _cluster(service).get("rayVersion", ""))
    if version is None or tuple(map(int, version.groups())) < _TOKEN_SINCE:
        yield "rayVersion: is missing or below 2.52, which knows no token; set that of the image"


def _ports(service: Manifest) -> Iterator[str]:
    """Not the operator's rule: it would make a Service without them."""
    ports = {port["name"] for port in container_of(groups(service)["head"]).get("ports", ())}
    if not {"serve", "serve-grpc"} <= ports:
        yield "head: without ports named serve and serve-grpc the Service lacks them; add them"


def _tokens(service: Manifest) -> Iterator[str]:
    """Not the operator's rule: without a token Ray runs code for whoever reaches its ports."""
    if _cluster(service).get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode: Ray must ask for a token; set it to token"
    for name, group in groups(service).items():
        for variable in _variables(group):
            if variable.startswith("RAY_AUTH_"):
                yield f"{name}: {variable} overrules authOptions; remove it"


_RULES = (
    _metadata,
    _upgrades,
    _group,
    _replicas,
    _authentication,
    _ports,
    _tokens,
)
