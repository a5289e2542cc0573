"""The same bits from the same sources, whatever processor they are compiled for."""

import shutil
import subprocess
from pathlib import Path

import pytest

from cluster import cpp
from tests.support.choices import IS_NIGHT
from tests.support.compiled import CPU, SOURCES, ahead, program

_PROGRAM = Path(__file__).parents[2] / "native" / "bits.cpp"
# Those of serving, but for the kind of output.
_OPTIONS = [each for each in cpp._OPTIONS if each != "-shared"]


def _told(made: Path, *run: str) -> list[str]:
    """The lines of the program."""
    done = subprocess.run([*run, made], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def _compiled(*options: str) -> list[str]:
    return _told(program("g++", *_OPTIONS, "-O1", *options, _PROGRAM, *SOURCES))


@pytest.fixture(scope="module")
def here() -> list[str]:
    """By the library that serves here."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = cpp._built(CPU, cpp._NATIVE)
    return _told(program("g++", *_OPTIONS, *cpp._NATIVE, _PROGRAM, library))


def test_every_part_is_told_of(here: list[str]):
    assert [line.rpartition(" ")[0] for line in here] == [
        *("norms", "gates", "cosines", "sines", "draws", "ranks", "scores", "totals"),
        *("few bits", "bfloat16", "float32"),
    ]


@pytest.mark.skipif(not IS_NIGHT, reason="ARM has four, too; a night tests both")
def test_registers_of_four_floats_without_fused_instructions_give_the_same(
    here: list[str],
):
    assert _compiled("-DDRAFTHOUSE_LANES=4") == here


def test_registers_of_sixteen_floats_give_the_same(here: list[str]):
    assert _compiled("-Wno-psabi", "-DDRAFTHOUSE_LANES=16") == here


def test_arm_gives_the_same(here: list[str]):
    """By the library of the wheel."""
    compiler, machine = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if shutil.which(compiler) is None or shutil.which(machine) is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    (library,) = (ahead(CPU, cpp.PROCESSORS, "aarch64") / "ahead").glob("*.so")
    made = program(compiler, *_OPTIONS, _PROGRAM, library)
    assert _told(made, machine, "-L", "/usr/aarch64-linux-gnu", "-cpu", "max") == here
