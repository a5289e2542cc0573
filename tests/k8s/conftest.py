"""The manifests, rendered: each fixture is there once for each kustomization."""

from typing import Any

import pytest
import yaml

from cluster.config.file import ServeFile, load
from tests.support.choices import absent
from tests.support.k8s.rendering import (
    MANIFESTS,
    REPOSITORY,
    SCHEMAS,
    only,
    rendered,
    with_components,
)
from tests.support.k8s.schemas import strict_schema


@pytest.fixture(scope="session", params=MANIFESTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def objects(name: str) -> list[dict[str, Any]]:
    return rendered(REPOSITORY / MANIFESTS[name][0])


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The base with every component."""
    return with_components(tmp_path_factory.mktemp("overlay"))


@pytest.fixture(scope="session")
def service(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(only("RayService", objects))


@pytest.fixture(scope="session")
def serve_file(service: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ServeFile:
    path = tmp_path_factory.mktemp("serve") / "serve.yaml"
    path.write_text(service["spec"]["serveConfigV2"], encoding="utf-8")
    return load(path)


@pytest.fixture(scope="session")
def schema() -> dict[str, Any]:
    path = SCHEMAS / "ray.io_rayservices.yaml"
    if not path.exists():
        absent("KubeRay's schemas are not here: ../shared/schemas beside the repository")
    return strict_schema(yaml.safe_load(path.read_text(encoding="utf-8")))
