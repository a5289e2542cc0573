"""What is installed: the pins and what pyproject.toml asks for must agree."""

import importlib.metadata
import re
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


def locked() -> dict[str, str]:
    """Of each package in the lock, the pin and its hashes as they stand there."""
    entries = re.split(r"\n(?=\S)", (REPOSITORY / "requirements.lock").read_text(encoding="utf-8"))
    return {normalized(re.split(r"[=;\s]", entry)[0]): entry for entry in entries}


def served() -> list[Requirement]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    return [Requirement(line) for line in lines]


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


def test_the_lock_has_hashes_of_all_that_is_served_but_torch() -> None:
    """`make lock` renews it."""
    entries = locked()
    known = {*entries, "torch"}
    assert {normalized(each.name) for each in served()} <= known
    for name in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entries[name]), name
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert normalized(requirement.name) in known, f"{name} needs {requirement}"


def test_the_lock_agrees_with_the_pins_and_names_no_origin() -> None:
    pinned = pins()
    for name, entry in locked().items():
        version = Version(re.split(r"[;\s]", entry.partition("==")[2])[0])
        assert pinned.get(name, version) == version, name
        assert "://" not in entry
        assert "@" not in entry


def test_the_image_installs_by_the_lock_and_lists_what_it_holds() -> None:
    image = (REPOSITORY / "k8s" / "Dockerfile").read_text(encoding="utf-8")
    assert "pip install --no-deps --require-hashes -r requirements.lock" in image
    assert "cyclonedx-py environment" in image
    assert {"cyclonedx-bom", "uv"} <= pins().keys()
