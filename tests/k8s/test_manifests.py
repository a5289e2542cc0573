from __future__ import annotations

import copy
import importlib
import itertools
import json
import shutil
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from cluster.config import Config
from cluster.config_file import ServeFile, load
from deployments.ingress.servicers import MESSAGE_LIMIT, message_limit
from tests.support.manifests import (
    REPOSITORY,
    SCHEMAS,
    NodeShape,
    door_problems,
    node_shapes,
    only,
    operator_problems,
    placement_problems,
    rendered,
    schema_problems,
    strict_schema,
)

# Folder of a kustomization and the Serve configuration that its RayService must carry.
MANIFESTS = {
    "base": ("k8s/base", "k8s/base/serve.yaml"),
    "8xh100": ("k8s/overlays/8xh100", "configs/llama-70b-8xh100.yaml"),
}

Breakage = Callable[[dict[str, Any]], None]

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which renders the manifests, is not installed"
)


@pytest.fixture(scope="module", params=MANIFESTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def objects(name: str) -> list[dict[str, Any]]:
    return rendered(REPOSITORY / MANIFESTS[name][0])


@pytest.fixture(scope="module")
def service(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(only("RayService", objects))


@pytest.fixture(scope="module")
def serve_file(service: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ServeFile:
    path = tmp_path_factory.mktemp("serve") / "serve.yaml"
    path.write_text(service["spec"]["serveConfigV2"], encoding="utf-8")
    return load(path)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    path = SCHEMAS / "ray.io_rayservices.yaml"
    if not path.exists():
        pytest.skip("the KubeRay schemas are not here (../shared/schemas beside the repository)")
    return strict_schema(yaml.safe_load(path.read_text(encoding="utf-8")))


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


# Negative controls: the checks above mean something only if a broken manifest fails them.


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
    assert problems == ["coordinator: no worker group has the labels {'zone': 'c'}"]
