"""C++ sources are compiled once per machine, or ahead; nobody fails where they cannot be."""

import ctypes
import logging
import platform
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from cluster import cpp
from cluster.engine.cpu import causal_lm, kernels
from cluster.engine.cpu.products import products_here
from cluster.engine.draw import native
from cluster.spec.native import trees
from tests.conftest import REPOSITORY, python
from tests.support.choices import by_night
from tests.support.errors import config_error

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
needs_x86 = pytest.mark.skipif(
    "avx2" not in products_here(), reason="needs an x86-64 processor with AVX2"
)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a source and a header, and a cache of its own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("enum { ANSWER = 42 };\n", "utf-8")
    text = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
    (folder / "answer.cpp").write_text(text, "utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def load(sources: Path) -> cpp.Native:
    loaded = cpp.load(sources)
    assert loaded is not None
    return loaded


def answer(sources: Path) -> int:
    """Of the library that is loaded."""
    return int(load(sources).library.answer())


def built(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.rglob("*.so"))


@needs_compiler
def test_an_equal_library_is_not_built_twice_and_a_changed_header_makes_another(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    assert answer(sources) == answer(sources) == 42
    assert [each.message.partition(":")[0] for each in caplog.records] == ["phase build"]
    (first,) = built(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert answer(sources) == 42
    assert [path.stat().st_mtime_ns for path in built(tmp_path)] == [stamp]

    (sources / "answer.h").write_text("enum { ANSWER = 43 };\n", "utf-8")
    assert answer(sources) == 43
    assert len(built(tmp_path)) == 2


@needs_compiler
@pytest.mark.parametrize("has_home", [True, False])
def test_without_a_home_to_write_to_it_is_built_elsewhere(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_home: bool
):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cpp.tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    if has_home:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(cpp.Path, "home", no_home)
    assert answer(sources) == 42
    assert [path.parent.parent.name for path in built(tmp_path)] == ["scratch"]


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (None, "apt install g++"),
        ("/usr/bin/g++", "/usr/bin/g++ failed: error: unknown processor"),
    ],
)
def test_without_a_compiler_or_one_that_can_there_is_none_and_a_reason(
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiler: str | None,
    reason: str,
):
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr=b"error: unknown processor\nmore")

    monkeypatch.setattr(cpp.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(cpp.subprocess, "run", fail)
    caplog.set_level(logging.INFO)
    assert cpp.load(sources) is None
    assert reason in caplog.text


def test_it_can_be_switched_off_and_no_other_value_means_anything(
    sources: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DRAFTHOUSE_NATIVE", "0")
    assert cpp.load(sources) is None
    for value in ("no", "Sanitized", " 0"):
        monkeypatch.setenv("DRAFTHOUSE_NATIVE", value)
        told = f"NATIVE: '{value}' is none of: 0, 1, sanitized"
        with config_error(told) as found:
            cpp.load(sources)
        assert found.value.param == "DRAFTHOUSE_NATIVE"


@needs_compiler
@pytest.mark.parametrize(
    ("place", "names"),
    [
        (causal_lm, {"DecoderLayer": "Weights", "Growth": "GrowthRules"}),
        (causal_lm, dict.fromkeys(["Rows", "RankedDraw", "GrowingModel", "GrowingTree"])),
        (native, {"DrawShare": None}),
    ],
)
def test_a_structure_has_the_size_in_cpp_that_python_takes_it_for(
    place: ModuleType, names: dict[str, str | None]
):
    """A field that only one side has would shift all that follow it."""
    size_of = load(Path(kernels.__file__).parent).library.struct_size
    for there, here in names.items():
        assert size_of(there.encode()) == ctypes.sizeof(getattr(place, here or there)), there


@needs_compiler
def test_a_structure_is_given_as_many_words_as_it_has_in_cpp(monkeypatch: pytest.MonkeyPatch):
    given, packed = [], trees._packed
    monkeypatch.setattr(trees, "_call", lambda _, *fields: given.extend(map(packed, fields)))
    trees.are_sound([], [], 0, (1.0, 1.0, 0.0))
    trees.merge_trees([], 0)
    trees.score_trees([], [], 0, 1.0)
    size_of = load(Path(trees.__file__).parent).library.struct_size
    assert [*map(len, given)] == [*map(size_of, (b"Checked", b"Held", b"Merged", b"Scored"))]


@needs_compiler
def test_another_version_of_the_compiler_makes_another_build(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Behind the same path, as after an upgrade."""
    real = shutil.which("g++")
    compiler = tmp_path / "compiler"
    builds = []
    for version in (1, 2, 1):
        compiler.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nexec {real} "$@"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setattr(cpp.shutil, "which", lambda name: str(compiler))
        builds.append(load(sources).build)
    assert builds[0] == builds[2] != builds[1]


_BY_PROCESSOR = """
#if defined(__AMX_BF16__)
enum { ANSWER = 4 };
#elif defined(__AVX512BF16__)
enum { ANSWER = 3 };
#elif defined(__AVX512F__)
enum { ANSWER = 2 };
#elif defined(__AVX2__)
enum { ANSWER = 1 };
#else
enum { ANSWER = 0 };
#endif
"""


@needs_compiler
@needs_x86
def test_without_a_compiler_the_library_of_the_most_able_processor_that_fits_is_taken(
    sources: Path, monkeypatch: pytest.MonkeyPatch
):
    (sources / "answer.h").write_text(_BY_PROCESSOR, "utf-8")
    assert len(list(cpp.compile_ahead(sources.parent))) == 5
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    flags = {each.name: each.flags | {"another"} for each in cpp.PROCESSORS}
    for answer, most_able in enumerate(("x86-64", "avx2", "avx512", "avx512bf16", "amx")):
        monkeypatch.setattr(cpp, "cpu_flags", partial(flags.get, most_able))
        loaded = load(sources)
        assert loaded.library.answer() == answer
        assert loaded.build.startswith(f"{most_able}-")
    (sources / "answer.h").write_text("enum { ANSWER = 5 };\n", "utf-8")
    assert cpp.load(sources) is None, "it is of other sources"
    (sources / "answer.h").write_text(_BY_PROCESSOR, "utf-8")
    monkeypatch.setattr(cpp, "cpu_flags", lambda: frozenset({"asimd"}))
    assert cpp.load(sources) is None, "it is for other processors"


def test_compiling_ahead_needs_nothing_that_must_be_installed():
    """The image compiles before it has packages."""
    assert python("-S", "-c", "import cluster.cpp").returncode == 0


def test_nothing_is_compiled_ahead_for_a_machine_without_kinds(tmp_path: Path):
    with pytest.raises(OSError, match="ahead for riscv64; where g\\+\\+ is, what is needed"):
        list(cpp.compile_ahead(tmp_path, machine="riscv64"))


def test_another_machine_needs_a_compiler_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None if "gnu" in name else name)
    with pytest.raises(OSError, match=rf"no C\+\+ compiler \({other}-linux-gnu-g\+\+\)$"):
        list(cpp.compile_ahead(tmp_path, machine=other))


@pytest.mark.parametrize(
    ("has_compiler", "has_library", "mode", "is_slow"),
    [
        (False, False, "1", True),
        (False, False, "avx2", True),
        (False, False, "0", False),
        (True, False, "1", False),
        (False, True, "1", False),
    ],
)
def test_a_warning_says_what_is_slow_where_no_native_code_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    has_compiler: bool,
    has_library: bool,
    mode: str,
    is_slow: bool,
):
    monkeypatch.setattr(cpp, "log", logging.getLogger("cluster.cpp.tested"))
    monkeypatch.setattr(cpp.shutil, "which", lambda name: name if has_compiler else None)
    monkeypatch.setattr(cpp, "_ahead", lambda folder: folder if has_library else None)
    monkeypatch.setenv("DRAFTHOUSE_NATIVE", mode)
    cpp.check()
    assert len(caplog.records) == is_slow
    for record in caplog.records:
        assert record.levelno == logging.WARNING
        assert record.message.startswith("decoding on a CPU is slow here, and nothing drafts")
        assert record.message.endswith("apt install g++")


@by_night
def test_check_says_it_in_one_line(tmp_path: Path):
    """Not once more for each folder that it would load."""
    if list((REPOSITORY / "cluster").rglob("ahead")):
        pytest.skip("this checkout has native code that was compiled ahead")
    nothing = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = python("-m", "deployments.cli", "check", "configs/tiny.yaml", **nothing)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("WARNING cluster.cpp: decoding on a CPU")
