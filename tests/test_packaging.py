"""What is installed: the pins and what pyproject.toml asks for must agree."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[1]


def pins() -> dict[str, Version]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    parts = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalized(name): Version(version) for name, version in parts}


def normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def requirements() -> list[Requirement]:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"].values()
    listed = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return [Requirement(line) for line in listed if not line.startswith("drafthouse")]


def test_every_dependency_is_pinned_to_a_version_it_allows() -> None:
    pinned = pins()
    for requirement in requirements():
        version = pinned.get(normalized(requirement.name))
        assert version is not None, f"{requirement.name} is missing in constraints.txt"
        assert version in requirement.specifier, f"{requirement} does not allow {version}"


def test_pins_name_no_build_so_that_each_machine_takes_its_own() -> None:
    assert all(version.local is None for version in pins().values())


def test_the_generated_stubs_match_the_pinned_protobuf_compiler() -> None:
    pinned = pins()
    assert pinned["grpcio"] == pinned["grpcio-tools"] == pinned["grpcio-reflection"]
