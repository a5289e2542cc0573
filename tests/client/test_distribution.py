"""drafthouse-client is this folder alone: what its wheel holds, needs and imports.

How long its installation takes depends on the network: docs/benchmarks/clients has a record of it.
"""

import json
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.conftest import REPOSITORY, said_by
from tests.test_packaging import pins, project

SOURCES = REPOSITORY / "cluster" / "client"
PROBE = """
import sys, time, json
started_at = time.perf_counter()
import {module}
print(json.dumps({{
    "seconds": time.perf_counter() - started_at,
    "packages": sorted({{name.partition(".")[0] for name in sys.modules}}),
    "file": {module}.__file__,
}}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the wheel holds, as pip unpacks it."""
    built = tmp_path_factory.mktemp("built")
    build = ("-m", "hatchling", "build", "-t", "wheel", "-d", built)
    said_by(sys.executable, *build, folder=SOURCES)
    (wheel,) = built.glob("*.whl")
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def probe(installed: Path, module: str = "drafthouse_client") -> dict[str, Any]:
    """Import a module in an interpreter that knows this repository not at all."""
    path = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    code = f"import sys; sys.path[:0] = {path!r}\n" + PROBE.format(module=module)
    return json.loads(said_by(sys.executable, "-S", "-I", "-c", code, folder=installed))


def test_the_wheel_imports_grpc_and_protobuf_and_nothing_else(installed: Path):
    found, grpc = probe(installed), probe(installed, "grpc.aio")
    assert Path(found["file"]).is_relative_to(installed)
    others = set(found["packages"]) - set(grpc["packages"]) - sys.stdlib_module_names
    assert others == {"drafthouse_client", "google"}  # protobuf is google.protobuf


def test_the_wheel_holds_every_module_of_the_folder(installed: Path):
    package = installed / "drafthouse_client"
    held = {path.relative_to(package).as_posix() for path in package.rglob("*.py*")}
    sources = {path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.py*")}
    assert {name for name in sources if "__pycache__" not in name} <= held
    assert "answer.py" in held
    assert (package / "py.typed").is_file()


def test_client_and_server_carry_one_version_and_agree_on_what_they_need():
    client, server = project(SOURCES), project()
    assert client["version"] == server["version"]
    assert client["requires-python"] == server["requires-python"]
    needs = {Requirement(line).name: Requirement(line) for line in client["dependencies"]}
    assert set(needs) == {"grpcio", "protobuf"}
    for name, need in needs.items():
        assert pins()[name] in need.specifier
