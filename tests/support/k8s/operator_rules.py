"""What KubeRay 1.7 refuses although its schema lets it pass: the operator's own validation, ported.

Source: ray-operator/controllers/ray/utils/validation.go at v1.7.0, as far as it is about a
RayService and what our manifests say; what has rules that are not ported is a problem itself.
Every problem is `path: what is wrong; the remedy`.  The last rules are ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.support.k8s.rendering import Manifest, container_of, groups, pod_of

Rule = Callable[[Manifest], Iterator[str]]

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_MAX_NAME_LEN = 47
_STRATEGIES = ("None", "NewCluster", "NewClusterWithIncrementalUpgrade")
_TOKEN_SINCE = (2, 52)
_EXPLICIT_RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}
_TLS_VARIABLES = {"RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"}


def operator_problems(service: Manifest, gates: Iterable[str] = ()) -> list[str]:
    """Return what the operator would refuse.  gates: its feature gates that are on beside those
    that are by default."""
    problems = [problem for rule in _RULES for problem in rule(service)]
    return problems + [
        f"spec.rayClusterConfig.{field}: needs the operator's feature gate {gate}; turn it on or "
        "leave the field out"
        for field, gate in _GATES.items()
        if field in _cluster(service) and gate not in set(gates)
    ]


_GATES = {"tlsOptions": "RayClusterMTLS"}
# Keys and variables of which the operator refuses some uses, and of which no manifest has any.
_UNPORTED = {
    *("priority", "suspend", "restartPolicy", "headService", "networkPolicy", "backend"),
    *("historyServerOptions", "enableK8sTokenAuth", "redis-username", "redis-password"),
    *("REDIS_USERNAME", "REDIS_PASSWORD", "RAY_REDIS_ADDRESS", "RAY_enable_autoscaler_v2"),
    *("KUBERAY_GEN_AUTOSCALER_START_CMD", "ray.io/initializing-timeout", "ray.io/ft-enabled"),
    "ray.io/external-storage-namespace",
}


def _cluster(service: Manifest) -> Manifest:
    found: Manifest = service["spec"]["rayClusterConfig"]
    return found


def _workers(service: Manifest) -> dict[str, Manifest]:
    return {name: group for name, group in groups(service).items() if name != "head"}


def _variables(group: Manifest) -> dict[str, Any]:
    # Without a container there is one problem, not several.
    containers = pod_of(group).get("containers", ())[:1]
    return {each["name"]: each.get("value") for one in containers for each in one.get("env", ())}


def _autoscaler_is_v2(service: Manifest) -> bool:
    return bool(_cluster(service).get("autoscalerOptions", {}).get("version") == "v2")


def _version(service: Manifest) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", _cluster(service).get("rayVersion", ""))
    return tuple(int(number) for number in found.groups()) if found else ()


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
    spec, cluster = service["spec"], _cluster(service)
    path = "spec.upgradeStrategy"
    strategy = spec.get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in _STRATEGIES:
        yield f"{path}.type: {kind!r} is none of {', '.join(_STRATEGIES)}; choose one"
    if cluster.get("upgradeStrategy", {}).get("type"):
        yield f"spec.rayClusterConfig.upgradeStrategy: is for bare clusters; use {path}"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "spec.rayClusterDeletionDelaySeconds: is negative; use the longest stream's time"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    if not cluster.get("enableInTreeAutoscaling"):
        yield f"{path}.type: {kind} needs an autoscaler; set enableInTreeAutoscaling: true"
    options, path = strategy.get("clusterUpgradeOptions", {}), f"{path}.clusterUpgradeOptions"
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent", -1)
    for key, share in (("maxSurgePercent", surge), ("stepSizePercent", step)):
        if not 0 <= share <= 100:
            yield f"{path}.{key}: is missing or no share; set it from 0 to 100"
    if step > surge:
        yield f"{path}.stepSizePercent: is above maxSurgePercent; lower it to {surge} or less"
    if options.get("intervalSeconds", 0) <= 0:
        yield f"{path}.intervalSeconds: is missing or not above 0; set it"
    if not options.get("gatewayClassName"):
        yield f"{path}.gatewayClassName: is missing; name the class of your gateways"


def _group(service: Manifest) -> Iterator[str]:
    for name, group in groups(service).items():
        parameters = group.get("rayStartParams", {})
        if not pod_of(group).get("containers"):
            yield f"{name}: has no container; add the one that Ray runs in"
        if group.get("resources") and _EXPLICIT_RESOURCES & set(parameters):
            yield f"{name}: resources are set in two places; keep those in `resources`"
        if "labels" in parameters:
            yield f"{name}.rayStartParams.labels: is refused; use the group's field `labels`"
        for key, value in group.get("labels", {}).items():
            prefix, _, own = key.rpartition("/")
            is_key = _LABEL_NAME.fullmatch(own) and (not prefix or _LABEL_PREFIX.fullmatch(prefix))
            if not is_key or (value and not _LABEL_NAME.fullmatch(value)):
                yield f"{name}.labels: {key}={value} is no label of Kubernetes; rename it"


def _replicas(service: Manifest) -> Iterator[str]:
    is_scaled = _cluster(service).get("enableInTreeAutoscaling", False)
    for name, group in _workers(service).items():
        low, high = group.get("minReplicas"), group.get("maxReplicas")
        if not is_scaled and None in (low, high):
            yield f"{name}: without an autoscaler minReplicas and maxReplicas must be set; set them"
            continue
        if (low or 0) < 0 or (high or 0) < 0:
            yield f"{name}: minReplicas or maxReplicas is negative; use 0 or more"
        if None not in (low, high) and low > high:
            yield f"{name}: minReplicas {low} is above maxReplicas {high}; swap them"
        # The operator starts other numbers than these in silence.
        elif not (low or 0) <= group.get("replicas", 0) <= (math.inf if high is None else high):
            yield f"{name}: replicas {group.get('replicas')} is not from {low} to {high}; move it"
        is_v2 = _autoscaler_is_v2(service)
        if (idle := group.get("idleTimeoutSeconds")) is not None and (idle < 0 or not is_v2):
            yield f"{name}.idleTimeoutSeconds: needs autoscalerOptions.version: v2, and 0 or more"


def _autoscaler(service: Manifest) -> Iterator[str]:
    if _cluster(service).get("autoscalerOptions", {}).get("idleTimeoutSeconds", 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds: is negative; use 0 or more"


def _authentication(service: Manifest) -> Iterator[str]:
    options = _cluster(service).get("authOptions", {})
    if options.get("mode") == "token" and _version(service) < _TOKEN_SINCE:
        yield "rayVersion: is missing or below 2.52, which knows no token; set that of the image"


def _managed(service: Manifest) -> Iterator[str]:
    cluster = _cluster(service)
    if not cluster.get("tlsOptions", {}).get("enabled"):
        return
    for name, group in groups(service).items():
        mounts = container_of(group).get("volumeMounts", ())
        if _TLS_VARIABLES & set(_variables(group)) or any(
            mount["name"] == "ray-tls" or mount["mountPath"] == "/etc/ray/tls" for mount in mounts
        ):
            yield f"{name}: sets up Ray's TLS beside tlsOptions; leave that to KubeRay"


def _ports(service: Manifest) -> Iterator[str]:
    """Not the operator's rule: it would make a Service without them."""
    head = groups(service)["head"]
    if pod_of(head).get("containers"):
        ports = {port["name"] for port in container_of(head).get("ports", ())}
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


_RULES: tuple[Rule, ...] = (
    _metadata,
    _upgrades,
    _group,
    _replicas,
    _autoscaler,
    _authentication,
    _managed,
    _ports,
    _tokens,
)
