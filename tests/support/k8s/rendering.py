"""The manifests as `kubectl apply -k` would send them; needs no cluster."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import said_by
from tests.support.choices import absent

REPOSITORY = Path(__file__).resolve().parents[3]
SCHEMAS = REPOSITORY.parent / "shared/schemas"

# Folder of a kustomization and the Serve configuration that its RayService must carry.
MANIFESTS = {
    "base": ("k8s/base", "k8s/base/serve.yaml"),
    "8xh100": ("k8s/overlays/8xh100", "configs/llama-70b-8xh100.yaml"),
    "mixed-gpus": ("k8s/overlays/mixed-gpus", "configs/two-node.yaml"),
    "high-availability": (
        "k8s/overlays/high-availability",
        "k8s/overlays/high-availability/serve.yaml",
    ),
    "autoscaling": ("k8s/overlays/autoscaling", "k8s/overlays/autoscaling/serve.yaml"),
    "incremental-upgrade": (
        "k8s/overlays/incremental-upgrade",
        "k8s/overlays/autoscaling/serve.yaml",
    ),
}
COMPONENTS = ("gateway", "learning", "model-hub", "monitoring", "ray-tls")

Manifest = Mapping[str, Any]
Objects = Sequence[Manifest]


def read(path: str) -> str:
    """Return a file of the repository."""
    return (REPOSITORY / path).read_text("utf-8")


def rendered(folder: Path | str) -> Objects:
    """Return the objects of a kustomization."""
    if shutil.which("kubectl") is None:
        absent("kubectl, which renders the manifests, is not here")
    output = said_by("kubectl", "kustomize", folder)
    return [document for document in yaml.safe_load_all(output) if document]


def with_components(folder: Path) -> Objects:
    """Return the objects of the base with every component, from an overlay written to `folder`."""

    def from_there(path: str) -> str:
        return os.path.relpath(REPOSITORY / path, folder.resolve())

    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [from_there("k8s/base")],
        "components": [from_there(f"k8s/components/{name}") for name in COMPONENTS],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay), "utf-8")
    return rendered(folder)


def of_kind(kind: str, objects: Objects) -> list[Manifest]:
    """Return the objects of that kind."""
    return [item for item in objects if item["kind"] == kind]


def only(kind: str, objects: Objects) -> Manifest:
    """Return the one object of that kind."""
    (found,) = of_kind(kind, objects)
    return found


def groups(service: Manifest) -> dict[str, Manifest]:
    """Return the groups of pods of a RayService, the head's among them, by name."""
    cluster = service["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group for group in cluster.get("workerGroupSpecs", [])}
    return {"head": cluster["headGroupSpec"], **workers}


def pod_of(group: Manifest) -> Manifest:
    """Return the specification of a group's pods."""
    return group["template"]["spec"]


def container_of(group: Manifest) -> Manifest:
    """Return the container that Ray runs in."""
    return pod_of(group)["containers"][0]


def labels_of(name: str, group: Manifest) -> dict[str, str]:
    """Return the labels that a group's pods will have, KubeRay's own included."""
    kind = "head" if name == "head" else "worker"
    return {**group["template"]["metadata"]["labels"], "ray.io/node-type": kind}
