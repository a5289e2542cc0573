import importlib
import itertools
import json
import re
import tomllib
from dataclasses import replace

from cluster.config.applications import drafter_deployment
from cluster.config.file import ServeFile, load
from deployments.app import build
from tests.support.k8s.operator_rules import operator_problems
from tests.support.k8s.placement import node_shapes, placement_problems
from tests.support.k8s.rendering import (
    COMPONENTS,
    MANIFESTS,
    REPOSITORY,
    Manifest,
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
from tests.support.k8s.schemas import core_problems, rule_problems, schema_problems

# Of kinds that no schema here describes; `docs/kubernetes.md` says how they were checked.
_OTHERS = (
    "monitoring.coreos.com/v1",
    "monitoring.coreos.com/v1alpha1",
    "gateway.networking.k8s.io/v1",
)


def test_every_overlay_and_component_is_checked_and_on_the_page():
    overlays, components = (
        {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "k8s" / kind).iterdir()}
        for kind in ("overlays", "components")
    )
    assert overlays == {folder for folder, _ in MANIFESTS.values()} - {"k8s/base"}
    assert components == {f"k8s/components/{name}" for name in COMPONENTS}
    page = read("docs/kubernetes.md")
    assert [path for path in (*overlays, *components) if f"| `{path}` |" not in page] == []


def test_the_manifest_obeys_kuberays_schema_and_the_operators_own_rules(
    service: Manifest, schema: Manifest
):
    assert schema_problems(service, schema) == []
    assert list(rule_problems(service, schema)) == []
    assert operator_problems(service) == []


def test_objects_of_kubernetes_obey_its_schemas(objects: Objects):
    check_objects(objects)


def check_objects(objects: Objects) -> None:
    for item in objects:
        if item["apiVersion"] not in ("ray.io/v1", *_OTHERS):
            assert core_problems(item) == [], item["metadata"]["name"]


def test_the_components_go_together(everything: Objects, schema: Manifest):
    check_objects(everything)
    service = only("RayService", everything)
    assert schema_problems(service, schema) == []
    assert operator_problems(service, has_mtls=True) == []
    assert len({(item["kind"], item["metadata"]["name"]) for item in everything}) == len(everything)


def test_the_rayservice_carries_exactly_the_configuration_file(name: str, service: Manifest):
    expected = read(MANIFESTS[name][1])
    assert service["spec"]["serveConfigV2"] == expected


def test_no_helper_object_reaches_the_cluster(objects: Objects):
    assert {item["kind"] for item in objects} <= {
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "RayService",
        "Service",
        "StatefulSet",
    }


def test_the_application_can_be_imported_and_is_reachable_from_other_pods(
    serve_file: ServeFile,
):
    module, _, attribute = serve_file.document["applications"][0]["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
    assert serve_file.config.http.host == serve_file.config.grpc.host == "0.0.0.0"
    assert serve_file.config.network.interface == "node"


def test_everything_the_configuration_reserves_fits_the_worker_groups(
    service: Manifest, serve_file: ServeFile
):
    assert placement_problems(serve_file.config, node_shapes(service)) == []


def test_the_ports_of_the_configuration_are_those_of_the_pods_and_the_service(
    service: Manifest, serve_file: ServeFile
):
    expected = {"serve": serve_file.config.http.port, "serve-grpc": serve_file.config.grpc.port}
    for group in groups(service).values():
        ports = {port["name"]: port["containerPort"] for port in container_of(group)["ports"]}
        assert {key: ports[key] for key in expected} == expected
    serve_service = service["spec"]["serveService"]["spec"]
    assert {port["name"]: port["targetPort"] for port in serve_service["ports"]} == expected


def test_the_head_runs_no_replicas(service: Manifest):
    parameters = groups(service)["head"]["rayStartParams"]
    assert parameters["num-cpus"] == parameters["num-gpus"] == "0"


def test_every_pod_runs_unprivileged_and_writes_to_its_own_volumes_only(
    service: Manifest,
):
    has_autoscaler = service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling", False)
    security = pod_of(groups(service)["head"])["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"
    for name, group in groups(service).items():
        pod, container = pod_of(group), container_of(group)
        assert pod["securityContext"] == security
        # The autoscaler beside the head asks Kubernetes for pods; nobody else has business there.
        is_asking = has_autoscaler and name == "head"
        assert pod["automountServiceAccountToken"] is is_asking
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts.values()) <= set(volumes)
        for place in ("/tmp", "/home/drafthouse"):
            assert volumes[mounts[place]]["emptyDir"] == {}
        assert set(container["resources"]) == {"requests", "limits"}


def test_a_worker_is_drained_before_its_pod_ends(service: Manifest, serve_file: ServeFile):
    """The hook fits the pod's grace, and an ingress' own drain fits the hook."""
    application = build(serve_file.document["applications"][0]["args"])
    options = application._bound_deployment._deployment_config
    for name, group in groups(service).items():
        if name == "head":
            continue
        command = container_of(group)["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:3] == ["python", "-m", "deployments.drain"]
        within_s = int(command[command.index("--within") + 1])
        assert pod_of(group)["terminationGracePeriodSeconds"] >= within_s + 20
        assert within_s >= options.graceful_shutdown_timeout_s + 30


def test_the_last_worker_that_serves_is_not_evicted(name: str, objects: Objects, service: Manifest):
    budgets = of_kind("PodDisruptionBudget", objects)
    covered = {
        group_name
        for group_name, group in groups(service).items()
        for budget in budgets
        if budget["spec"]["selector"]["matchLabels"].items() <= labels_of(group_name, group).items()
        and budget["spec"]["minAvailable"] == 1
    }
    # A head whose state is in Redis may go.
    may_go = {"head"} if name == "high-availability" else set()
    assert covered == set(groups(service)) - may_go


def test_a_volume_of_one_node_is_mounted_by_pods_of_one_node(objects: Objects, service: Manifest):
    claims = {item["metadata"]["name"]: item for item in of_kind("PersistentVolumeClaim", objects)}
    for name, group in groups(service).items():
        for volume in pod_of(group)["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim is None or claims[claim]["spec"]["accessModes"] == ["ReadWriteMany"]:
                continue
            affinity = pod_of(group)["affinity"]["podAffinity"]
            (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["topologyKey"] == "kubernetes.io/hostname"
            wanted = term["labelSelector"]["matchLabels"].items()
            assert wanted <= labels_of(name, group).items()


def test_one_worker_of_two_can_serve_alone():
    folder, file = MANIFESTS["high-availability"]
    parts = ("target", "coordinator", "ingress")
    config = load(file, [f"{part}.replicas=1" for part in parts]).config
    (shape,) = node_shapes(only("RayService", rendered(folder)))
    assert shape.count == 2
    assert placement_problems(config, [replace(shape, count=1)]) == []
    assert 2 * config.target.placement.num_cpus > shape.capacity["CPU"], "or one had both targets"


def test_the_most_replicas_of_the_autoscaling_overlay_fit_its_most_workers():
    folder, path = MANIFESTS["autoscaling"]
    file = load(path)
    most = {
        name: options["autoscaling_config"]["max_replicas"]
        for name, options in file.deployments.items()
    }
    assert set(most) == {"target", "coordinator", drafter_deployment("lm")}
    keys = {"drafter-lm": "drafters.lm"}
    overrides = [f"{keys.get(name, name)}.replicas={num}" for name, num in most.items()]
    service = only("RayService", rendered(folder))
    (shape,) = node_shapes(service)
    (workers,) = (g["maxReplicas"] for name, g in groups(service).items() if name != "head")
    config = load(path, overrides).config
    assert placement_problems(config, [replace(shape, count=workers)]) == []
    seats = config.target.engine.max_running_sequences * most["target"]
    assert config.coordinator.max_running_sequences == seats, "else more targets bring nothing"


def test_the_ray_version_is_the_one_the_image_installs(service: Manifest):
    project = tomllib.loads(read("pyproject.toml"))
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray[serve]=={version}" in project["project"]["optional-dependencies"]["serve"]
    pinned = read("constraints.txt").splitlines()
    assert f"ray=={version}" in pinned


def test_the_cluster_demonstration_serves_the_embedded_models():
    local = load("configs/tiny.yaml")
    base = load("k8s/base/serve.yaml")
    assert base.config.grpc.port == local.config.grpc.port
    here, there = local.config, base.config
    assert there.model_name == here.model_name
    assert there.tasks == here.tasks
    assert {n: d.kind for n, d in there.drafters.items()} == {
        n: d.kind for n, d in here.drafters.items()
    }
    # So the file can be checked in a checkout, and means the image's own models there.
    assert there.target.engine.model == here.target.engine.model


def _stages() -> dict[str, str]:
    """The stages of the image by name, in their order."""
    text = read("k8s/Dockerfile")
    parts = re.split(r"^FROM \S+ AS (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_image_without_gpus_has_kernels_and_no_compiler():
    stages = _stages()
    assert list(stages)[-1] == "cpu", "the one that is built where none is named"
    assert "RUN python -m cluster.cpp" in stages["kernels"]
    assert "COPY --from=kernels /opt/drafthouse/cluster cluster" in stages["drafthouse"]
    with_compiler = {name for name, text in stages.items() if re.search(r"\bg(cc|\+\+)", text)}
    assert with_compiler == {"kernels", "cuda"}
    for name in ("cpu", "cuda"):
        assert stages[name].rstrip().endswith("USER 1000")


def test_the_image_opens_no_port_but_the_clients():
    lines = read("k8s/Dockerfile").splitlines()
    assert [line for line in lines if line.startswith("EXPOSE")] == ["EXPOSE 8000 9000"]
    (command,) = (json.loads(line[4:]) for line in lines if line.startswith("CMD "))
    overrides = [after for word, after in itertools.pairwise(command) if word == "--set"]
    config = load(command[2], overrides).config
    assert command[:2] == ["drafthouse", "serve"]
    assert config.http.host == config.grpc.host == "0.0.0.0"
    assert config.network.interface == "loopback"
    assert config.dashboard.host == "127.0.0.1"
