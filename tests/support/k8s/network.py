"""Who may connect to whom, by the NetworkPolicies of a manifest.

As https://kubernetes.io/docs/concepts/services-networking/network-policies defines it: a pod that a
policy selects is closed in the directions that the policy names, but for what some policy lets
through.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from cluster.records import frozen
from tests.support.k8s.rendering import Objects, of_kind


@frozen
class Peer:
    """A pod, or, with an address alone, something outside the cluster.

    namespace: the labels of its namespace; empty = it is in the namespace of the policies.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: Mapping[str, str] = field(default_factory=dict)
    address: str = ""


def may_connect(
    objects: Objects, source: Peer, target: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Return True if the policies let `source` open a connection to `target`."""
    policies = of_kind("NetworkPolicy", objects)
    return _passes(policies, "Egress", source, target, port, protocol) and _passes(
        policies, "Ingress", target, source, port, protocol
    )


def _passes(
    policies: Objects, direction: str, pod: Peer, other: Peer, port: int, protocol: str
) -> bool:
    """Return True if the policies of `pod`, if it has any, let `other` through."""
    selected = [
        policy["spec"]
        for policy in policies
        if not pod.address
        and not pod.namespace
        and _matches(policy["spec"]["podSelector"], pod.labels)
        and direction in policy["spec"]["policyTypes"]
    ]
    key, side = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    return not selected or any(
        _has_port(rule, port, protocol)
        and (side not in rule or any(_is_peer(peer, other) for peer in rule[side]))
        for spec in selected
        for rule in spec.get(key, ())
    )


def _has_port(rule: Mapping[str, Any], port: int, protocol: str) -> bool:
    return "ports" not in rule or any(
        each.get("protocol", "TCP") == protocol and each.get("port", port) == port
        for each in rule["ports"]
    )


def _is_peer(peer: Mapping[str, Any], other: Peer) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        return bool(other.address) and (
            _contains(block["cidr"], other.address)
            and not any(_contains(each, other.address) for each in block.get("except", ()))
        )
    if other.address:
        return False
    if "namespaceSelector" in peer:
        in_namespace = _matches(peer["namespaceSelector"], other.namespace)
    else:
        in_namespace = not other.namespace
    return in_namespace and _matches(peer.get("podSelector", {}), other.labels)


def _contains(network: str, address: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(network)


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in expressions), "others are not used"
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )
