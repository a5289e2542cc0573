"""What may be added to an overlay: monitors, alerts, a gateway."""

import argparse
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from cluster.errors import ERRORS
from cluster.metrics.recorder import EVERY_METRIC, PROCESS_LABEL
from cluster.train.cli import configure
from k8s.tools.monitoring import DASHBOARDS
from k8s.tools.panels import document
from tests.k8s.test_network_policies import DATA_PLANE, DNS, HEAD, INTERNET, WORKER
from tests.support.k8s.network import Peer, may_connect
from tests.support.k8s.rendering import (
    REPOSITORY,
    Objects,
    container_of,
    groups,
    labels_of,
    of_kind,
    only,
    pod_of,
    read,
    rendered,
)

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# Beside the labels of a series: those of a histogram and those that Prometheus adds.
_ADDED = {"namespace", "job", "le", PROCESS_LABEL}


def exported() -> dict[str, set[str]]:
    """The labels of every series of our own, by its name."""
    return {
        f"{metric.name}{suffix}": {*metric.labels, *_ADDED}
        for metric in EVERY_METRIC
        for suffix in _SUFFIXES[metric.kind]
    }


def selectors(expression: Any) -> Iterator[promql_parser.VectorSelector]:
    """The selectors of an expression, at any depth."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("args", "expr", "lhs", "rhs", "vector_selector"):
        below = getattr(expression, name, None)
        for each in below if isinstance(below, list) else [below]:
            if each is not None:
                yield from selectors(each)


def grouping_labels(expression: str) -> set[str]:
    return {
        label.strip()
        for group in re.findall(r"\bby\s*\(([^)]*)\)", expression)
        for label in group.split(",")
    }


@pytest.fixture(scope="session")
def alerts(everything: Objects) -> Objects:
    groups = only("PrometheusRule", everything)["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_asks_of_series_and_labels_that_exist(alerts: Objects):
    known, codes = exported(), {each.code for each in ERRORS}
    assert len(alerts) >= 8
    for alert in alerts:
        found = list(selectors(promql_parser.parse(alert["expr"])))
        assert found, alert["alert"]
        for selector in found:
            assert selector.name in known, alert["alert"]
            for matcher in selector.matchers.matchers:
                assert matcher.name in known[selector.name], alert["alert"]
                if matcher.name == "code":
                    assert set(matcher.value.split("|")) <= codes
        together = set.union(*(known[selector.name] for selector in found))
        assert grouping_labels(alert["expr"]) <= together, alert["alert"]
        written = " ".join(alert["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", written)) <= together


def test_our_page_is_scraped_by_the_service_and_rays_agents_at_every_pod(
    everything: Objects,
):
    service = only("RayService", everything)["spec"]["serveService"]
    (kept, *_) = only("ScrapeConfig", everything)["spec"]["relabelings"]
    ports = {each["name"] for each in service["spec"]["ports"]}
    assert kept["action"] == "keep"
    assert kept["regex"] in {f"{service['metadata']['name']};{port}" for port in ports}
    spec = only("PodMonitor", everything)["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    selected = spec["selector"]["matchLabels"].items()
    for name, group in groups(only("RayService", everything)).items():
        assert selected <= labels_of(name, group).items()
        assert endpoint["port"] in {each["name"] for each in container_of(group)["ports"]}


def test_grafana_finds_every_dashboard(everything: Objects):
    (found,) = (
        each
        for each in of_kind("ConfigMap", everything)
        if each["metadata"]["name"] == "drafthouse-dashboards"
    )
    assert found["metadata"]["labels"] == {"grafana_dashboard": "1"}
    for dashboard in DASHBOARDS:
        assert found["data"][f"{dashboard.name}.json"] == document(dashboard)


def test_the_overlay_of_the_page_labels_monitors_and_gives_prometheus_a_key(tmp_path: Path):
    page = read("docs/monitoring.md")
    fence = re.search(r"```yaml\n# kustomization.yaml\n(.*?)```", page, re.DOTALL)
    there = os.path.relpath(REPOSITORY, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(fence[1].replace("../..", there), "utf-8")
    objects = rendered(tmp_path)
    for kind in ("PodMonitor", "PrometheusRule", "ScrapeConfig"):
        for each in of_kind(kind, objects):
            assert "release" in each["metadata"]["labels"]
    ours, rays = only("ScrapeConfig", objects)["spec"], only("PodMonitor", objects)["spec"]
    assert ours["authorization"]["credentials"].keys() == {"name", "key"}
    assert "authorization" not in rays["podMetricsEndpoints"][0]


def test_the_gateway_leads_to_ports_of_the_service_by_a_listener_each(everything: Objects):
    gateway = only("Gateway", everything)
    listeners = {each["name"]: each["hostname"] for each in gateway["spec"]["listeners"]}
    # One listener takes routes of one kind for a name.
    assert len(set(listeners.values())) == len(listeners)
    service = only("RayService", everything)["spec"]["serveService"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    for kind, port in (("HTTPRoute", "serve"), ("GRPCRoute", "serve-grpc")):
        route = only(kind, everything)["spec"]
        (parent,) = route["parentRefs"]
        assert parent["name"] == gateway["metadata"]["name"]
        assert route["hostnames"] == [listeners[parent["sectionName"]]]
        (rule,) = route["rules"]
        (backend,) = rule["backendRefs"]
        assert backend == {"name": service["metadata"]["name"], "port": ports[port]}
    # What an operator looks at is not for everybody.
    paths = [
        each["path"]["value"]
        for each in only("HTTPRoute", everything)["spec"]["rules"][0]["matches"]
    ]
    assert paths == ["/v1", "/health"]


def test_the_gateways_services_are_those_of_the_contract(everything: Objects):
    (rule,) = only("GRPCRoute", everything)["spec"]["rules"]
    named = {each["method"]["service"] for each in rule["matches"]}
    proto = read("protos/drafthouse/v1/generation.proto")
    (package,) = re.findall(r"^package (.+);", proto, re.MULTILINE)
    services = re.findall(r"^service (\w+)", proto, re.MULTILINE)
    assert named == {*(f"{package}.{each}" for each in services), "grpc.health.v1.Health"}


def test_the_job_that_trains_is_a_command_of_ours_on_the_volume_of_the_targets(
    everything: Objects,
):
    job = only("CronJob", everything)["spec"]["jobTemplate"]["spec"]["template"]
    (container,) = job["spec"]["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert container["workingDir"] == mounts["learning"]
    (words,) = re.findall(r"drafthouse train (.*)", container["args"][0].replace("\\\n", ""))
    parser = argparse.ArgumentParser()
    configure(parser)
    arguments = parser.parse_args(shlex.split(words))
    assert not arguments.from_traffic.is_absolute()
    claim = {"claimName": only("PersistentVolumeClaim", everything)["metadata"]["name"]}
    _, target, *_others = groups(only("RayService", everything)).values()
    for pod in (job["spec"], pod_of(target)):
        assert claim in [volume.get("persistentVolumeClaim") for volume in pod["volumes"]]
        assert pod["securityContext"]["runAsUser"] == 1000
    mount = {"name": "learning", "mountPath": mounts["learning"]}
    assert mount in container_of(target)["volumeMounts"]
    trainer = Peer(job["metadata"]["labels"])
    for other in (HEAD, WORKER, DNS, INTERNET):
        assert not may_connect(everything, trainer, other, 443)
        assert not may_connect(everything, other, trainer, 443)
    assert not may_connect(everything, trainer, WORKER, DATA_PLANE)


@pytest.mark.parametrize("overlay", ["base", "overlays/8xh100", "overlays/high-availability"])
def test_every_pod_has_the_secrets_that_the_page_names(overlay: str):
    page = read("docs/kubernetes.md")
    named = re.findall(r"^\| `generic (drafthouse-\S+)", page, re.MULTILINE)
    objects = rendered(f"k8s/{overlay}")
    for group in groups(only("RayService", objects)).values():
        (volume,) = (each for each in pod_of(group)["volumes"] if each["name"] == "secrets")
        sources = [source["secret"] for source in volume["projected"]["sources"]]
        assert sources == [{"name": name, "optional": True} for name in named]
        (mount,) = (
            each for each in container_of(group)["volumeMounts"] if each["name"] == "secrets"
        )
        assert mount["mountPath"] == "/etc/drafthouse"
        assert mount["readOnly"]
