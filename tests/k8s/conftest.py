"""The manifests, rendered: each fixture is there once for each kustomization."""

import pytest
import yaml

from cluster.config.file import ServeFile, load
from tests.support.choices import absent
from tests.support.k8s.rendering import (
    MANIFESTS,
    SCHEMAS,
    Manifest,
    Objects,
    only,
    rendered,
    with_components,
)
from tests.support.k8s.schemas import strict_schema


@pytest.fixture(scope="session", params=MANIFESTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def objects(name: str) -> Objects:
    return rendered(MANIFESTS[name][0])


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """The base with every component."""
    return with_components(tmp_path_factory.mktemp("overlay"))


@pytest.fixture(scope="session")
def service(objects: Objects) -> Manifest:
    return only("RayService", objects)


@pytest.fixture(scope="session")
def serve_file(service: Manifest, tmp_path_factory: pytest.TempPathFactory) -> ServeFile:
    path = tmp_path_factory.mktemp("serve") / "serve.yaml"
    path.write_text(service["spec"]["serveConfigV2"], "utf-8")
    return load(path)


@pytest.fixture(scope="session")
def schema() -> Manifest:
    path = SCHEMAS / "ray.io_rayservices.yaml"
    if not path.exists():
        absent("KubeRay's schemas are not here: ../shared/schemas beside the repository")
    return strict_schema(yaml.safe_load(path.read_text("utf-8")))
