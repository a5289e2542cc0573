from __future__ import annotations

import importlib
import itertools
import json
import tomllib
from typing import Any

from cluster.config.file import ServeFile, load
from deployments.ingress.servicers import MESSAGE_LIMIT, message_limit
from tests.support.manifests import (
    MANIFESTS,
    REPOSITORY,
    door_problems,
    node_shapes,
    only,
    operator_problems,
    placement_problems,
    schema_problems,
)


def test_the_manifest_obeys_kuberays_schema(
    service: dict[str, Any], schema: dict[str, Any]
) -> None:
    assert schema_problems(service, schema) == []


def test_the_manifest_obeys_the_operators_own_rules(service: dict[str, Any]) -> None:
    assert operator_problems(service) == []


def test_the_proxies_take_no_larger_messages_than_the_ingress(
    service: dict[str, Any], serve_file: ServeFile
) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        for container in group["template"]["spec"]["containers"]:
            values = {entry["name"]: entry.get("value") for entry in container["env"]}
            assert values[MESSAGE_LIMIT] == str(message_limit(serve_file.config.ingress))


def test_the_rayservice_carries_exactly_the_configuration_file(
    name: str, service: dict[str, Any]
) -> None:
    expected = (REPOSITORY / MANIFESTS[name][1]).read_text(encoding="utf-8")
    assert service["spec"]["serveConfigV2"] == expected


def test_no_helper_object_reaches_the_cluster(objects: list[dict[str, Any]]) -> None:
    assert {item["kind"] for item in objects} <= {
        "RayService",
        "NetworkPolicy",
        "PersistentVolumeClaim",
    }


def test_the_application_can_be_imported_and_is_reachable_from_other_pods(
    serve_file: ServeFile,
) -> None:
    module, _, attribute = serve_file.document["applications"][0]["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
    for servicer in serve_file.document["grpc_options"]["grpc_servicer_functions"]:
        module, _, attribute = servicer.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))
    assert serve_file.config.http.host == "0.0.0.0"
    assert serve_file.config.grpc.listener == "serve"
    assert serve_file.config.network.interface == "node"


def test_everything_the_configuration_reserves_fits_the_worker_groups(
    service: dict[str, Any], serve_file: ServeFile
) -> None:
    assert placement_problems(serve_file.config, node_shapes(service)) == []


def test_the_ports_of_the_configuration_are_those_of_the_pods_and_the_service(
    service: dict[str, Any], serve_file: ServeFile
) -> None:
    expected = {"serve": serve_file.config.http.port, "serve-grpc": serve_file.config.grpc.port}
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        container = group["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {key: ports[key] for key in expected} == expected
    serve_service = service["spec"]["serveService"]["spec"]
    assert {port["name"]: port["targetPort"] for port in serve_service["ports"]} == expected


def test_the_head_runs_no_replicas(service: dict[str, Any]) -> None:
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert head["rayStartParams"]["num-gpus"] == "0"


def test_every_pod_runs_unprivileged_and_is_covered_by_the_network_policy(
    objects: list[dict[str, Any]], service: dict[str, Any]
) -> None:
    selector = only("NetworkPolicy", objects)["spec"]["podSelector"]["matchLabels"]
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        assert selector.items() <= template["metadata"]["labels"].items()
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
        container = template["spec"]["containers"][0]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert set(container["resources"]) == {"requests", "limits"}


def test_the_ray_version_is_the_one_the_image_installs(service: dict[str, Any]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray[serve]=={version}" in project["project"]["optional-dependencies"]["serve"]
    pinned = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={version}" in pinned


def test_the_cluster_demonstration_serves_the_embedded_models() -> None:
    local = load(REPOSITORY / "configs" / "tiny.yaml")
    base = load(REPOSITORY / "k8s" / "base" / "serve.yaml")
    assert base.config.grpc.port == local.config.grpc.port
    here, there = local.config, base.config
    assert there.model_name == here.model_name
    assert there.tasks == here.tasks
    assert {n: d.kind for n, d in there.drafters.items()} == {
        n: d.kind for n, d in here.drafters.items()
    }
    # The image keeps the repository's models/ at this place.
    assert there.target.engine.model == f"/opt/drafthouse/{here.target.engine.model}"


def test_whoever_can_reach_ray_must_show_a_token(service: dict[str, Any]) -> None:
    assert door_problems(service) == []


def test_the_image_opens_no_port_but_the_clients() -> None:
    lines = (REPOSITORY / "k8s" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("EXPOSE")] == ["EXPOSE 8000 9000"]
    (command,) = (json.loads(line[4:]) for line in lines if line.startswith("CMD "))
    overrides = [after for word, after in itertools.pairwise(command) if word == "--set"]
    config = load(REPOSITORY / command[2], overrides).config
    assert command[:2] == ["drafthouse", "serve"]
    assert config.http.host == config.grpc.host == "0.0.0.0"
    assert config.network.interface == "loopback"
    assert config.dashboard.host == "127.0.0.1"
