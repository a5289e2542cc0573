"""The same bits from the same sources, whatever processor they are compiled for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cluster import cpp
from cluster.engine.cpu import kernels as native
from tests.support.choices import IS_NIGHT

_FOLDER = Path(native.__file__).parent
_PROGRAM = Path(__file__).parents[2] / "native" / "bits.cpp"
# Those of serving, but for the kind of output.
_OPTIONS = (*(each for each in cpp._OPTIONS if each != "-shared"), "-static", f"-I{_FOLDER}")


def _told(folder: Path, command: str, *options: str, run: tuple[str, ...] = ()) -> list[str]:
    """The lines of the program, compiled with these options."""
    program = folder / "-".join((command, *options))
    sources = [_PROGRAM, *sorted(_FOLDER.glob("*.cpp"))]
    subprocess.run([command, *_OPTIONS, *options, "-o", program, *sources], check=True, timeout=900)
    done = subprocess.run([*run, program], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return _told(tmp_path_factory.mktemp("here"), "g++", "-O2", "-march=native")


def test_every_part_is_told_of(here: list[str]) -> None:
    assert [line.rpartition(" ")[0] for line in here] == [
        *("norms", "gates", "cosines", "sines", "draws", "ranks", "scores", "totals"),
        *("few bits", "bfloat16", "float32"),
    ]


@pytest.mark.skipif(not IS_NIGHT, reason="ARM has four, too; a night tests both")
def test_registers_of_four_floats_without_fused_instructions_give_the_same(
    here: list[str], tmp_path: Path
) -> None:
    assert _told(tmp_path, "g++", "-O1", "-DDRAFTHOUSE_LANES=4") == here


def test_registers_of_sixteen_floats_give_the_same(here: list[str], tmp_path: Path) -> None:
    assert _told(tmp_path, "g++", "-O1", "-Wno-psabi", "-DDRAFTHOUSE_LANES=16") == here


def test_arm_gives_the_same(here: list[str], tmp_path: Path) -> None:
    compiler, machine = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if shutil.which(compiler) is None or shutil.which(machine) is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    assert _told(tmp_path, compiler, "-O1", run=(machine, "-cpu", "max")) == here
