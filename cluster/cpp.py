"""C++ sources of this package, compiled once per machine and then loaded; or compiled ahead.

It serves functions that must be faster than any library.  Models have a slower way too, so they
also run without a compiler; nothing drafts then.  `python -m cluster.cpp` compiles ahead,
for several kinds of processors, what an image or a wheel then brings to machines without one.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from cluster.errors import ConfigError
from cluster.records import frozen

log = logging.getLogger(__name__)

_COMPILERS = ("g++", "clang++", "c++")
_OPTIONS = (
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-shared",
    "-pthread",
)
_NATIVE = ("-march=native",)
# The options of `make check-native`; the process must preload the sanitizer's library.
_SANITIZED = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
)
# Half a minute on an idle core of today; ten times as long on a slow one, or beside other starts.
_COMPILE_TIMEOUT_S = 900.0
VARIABLE = "DRAFTHOUSE_NATIVE"
_ABOUT_MODES = (
    "0 = no native code, 1 = native code, sanitized = with its memory accesses checked, the others "
    "= native code that multiplies groups of few bits by these instructions"
)
# Below a folder of sources: what was compiled ahead from them.
_AHEAD = "ahead"

NEEDED = (
    "drafts need native code: install a C++ compiler (on Debian and Ubuntu: apt install g++) or "
    "the wheel for this platform, or unset DRAFTHOUSE_NATIVE=0"
)


@frozen
class Processor:
    """A kind of processor to compile ahead for.

    machine: as `uname -m` says.  flags: those that a processor of the kind has, as the kernel lists
    them.
    """

    name: str
    machine: str
    options: tuple[str, ...]
    flags: frozenset[str]


AVX2 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = AVX512 | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16"}
_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_X86, _ARM = "x86_64", "aarch64"
# Those that our sources make a difference between, the most able first; each library has all
# `PRODUCTS` of its machine besides.
PROCESSORS = (
    Processor("amx", _X86, (*_V4, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"), _AMX),
    Processor("avx512bf16", _X86, (*_V4, "-mavx512bf16"), _BF16),
    Processor("avx512", _X86, _V4, AVX512),
    Processor("avx2", _X86, ("-march=x86-64-v3",), AVX2),
    Processor("x86-64", _X86, ("-march=x86-64",), frozenset({"sse2"})),
    Processor("armv8", _ARM, ("-march=armv8-a",), frozenset({"asimd"})),
)
# What multiplies weights in groups of few bits (`cluster.engine.cpu.products`), the fastest first.
PRODUCTS = ("amx-int8", "avx512-vnni", "avx-vnni", "avx2", "dotprod", "c")
_MODES = ("0", "1", "sanitized", *PRODUCTS)


# By name: what a function returns, and then its arguments.
Signatures = Mapping[str, tuple[Any, ...]]


@frozen
class Native:
    """A loaded library.

    build: identifies everything that determines its machine code (sources, options, compiler,
    processor); libraries of different builds may round differently.  sources: identifies these
    alone.
    """

    library: ctypes.CDLL
    build: str
    sources: str


def load(folder: Path) -> Native | None:
    """Load the library of the sources in `folder`; returns None, with a line in the log, if that
    fails.

    One that was compiled ahead for this processor is taken; else it is compiled, and kept in
    $XDG_CACHE_HOME/drafthouse under its build.
    Raises ConfigError for a `mode` that there is not.
    """
    wanted = mode()
    if wanted == "0":
        return None
    try:
        if wanted == "sanitized":
            path = _built(folder, (*_NATIVE, *_SANITIZED))
        else:
            path = _ahead(folder) or _built(folder, _NATIVE)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("no native code of %s: %s", folder.parent.name, _reason(error))
        return None
    return Native(library, path.stem.removeprefix("native-"), _digest(folder, ()))


def declared(library: ctypes.CDLL, signatures: Signatures) -> ctypes.CDLL:
    """Return the library once ctypes knows what its functions take and return."""
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class NativeFunctions:
    """Functions of the library of the sources in a folder, by name.  The first question may compile
    the library."""

    def __init__(self, folder: Path, signatures: Signatures) -> None:
        self._folder, self._signatures = folder, signatures

    @cached_property
    def _library(self) -> ctypes.CDLL | None:
        native = load(self._folder)
        if native is None:
            return None
        # Calls of a few microseconds: to give the interpreter away for them is to wait for it.
        return declared(ctypes.PyDLL(native.library._name), self._signatures)

    def are_here(self) -> bool:
        return self._library is not None

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Raises ConfigError where there is no native code."""
        if self._library is None:
            raise ConfigError(NEEDED)
        return cast(Callable[..., Any], getattr(self._library, name))


def check() -> None:
    """Warn, in one line for the process, where no native code is at hand and none can be compiled.

    Raises ConfigError for a `mode` that there is not."""
    if mode() == "0":
        return
    try:
        if not all(map(_ahead, _folders(Path(__file__).parent))):
            _compiler()
    except OSError as error:
        log.warning(
            "decoding on a CPU is slow here, and nothing drafts: no native code was compiled ahead "
            "for this processor, and %s",
            error,
        )
        log.setLevel(logging.WARNING)  # else `load` says it again for each folder


def mode() -> str:
    """Return what DRAFTHOUSE_NATIVE says; raises ConfigError for a value that means nothing."""
    found = os.environ.get(VARIABLE) or "1"
    if found not in _MODES:
        raise ConfigError.at(
            VARIABLE, f"{found!r} is none of: {', '.join(_MODES)} ({_ABOUT_MODES})"
        )
    return found


@cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of the first CPU as the kernel lists them; empty if it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        log.debug("this system has no /proc/cpuinfo")
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)", text, re.MULTILINE)
    return frozenset(found[1].split() if found else ())


def _ahead(folder: Path) -> Path | None:
    """Return the library that was compiled ahead for the most able processor that this one can
    stand for; None if there is none, or the sources have changed since."""
    for processor in PROCESSORS:
        if processor.flags <= cpu_flags():
            pattern = f"{processor.name}-{_digest(folder, processor.options)}-*.so"
            for found in sorted((folder / _AHEAD).glob(pattern)):
                return found
    return None


def compile_ahead(
    package: Path,
    processors: Sequence[Processor] = PROCESSORS,
    machine: str = platform.machine(),
) -> Iterator[Path]:
    """Compile all sources below `package` for each of the processors that `machine` may have;
    yields the libraries.  Raises OSError and SubprocessError."""
    kinds = [each for each in processors if each.machine == machine]
    if not kinds:
        raise OSError(
            f"nothing is compiled ahead for {machine}; where g++ is, what is needed is compiled at "
            "the first start"
        )
    compiler = _compiler(machine)
    version = _hash(_output(compiler, "--version"))
    for folder in _folders(package):
        place = folder / _AHEAD
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for processor in kinds:
            digest = _digest(folder, processor.options)
            library = place / f"{processor.name}-{digest}-{version}.so"
            yield _compiled(compiler, processor.options, folder, library)


def _folders(package: Path) -> list[Path]:
    """Return the folders of sources below `package`."""
    return sorted({path.parent for path in package.rglob("*.cpp")})


def _digest(folder: Path, options: Sequence[str]) -> str:
    """Return a name of the sources in `folder` and of the options that they are compiled with."""
    sources = sorted(folder.glob("*.[ch]*"))
    said = " ".join((*_OPTIONS, *options)).encode()
    return _hash(said, *(path.read_bytes() for path in sources))


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _compiler(machine: str = platform.machine()) -> str:
    is_other = machine != platform.machine()
    names = (f"{machine}-linux-gnu-g++",) if is_other else _COMPILERS
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        remedy = "" if is_other else "; on Debian and Ubuntu: apt install g++"
        raise OSError(f"there is no C++ compiler ({', '.join(names)}){remedy}")
    return found


def _built(folder: Path, options: Sequence[str]) -> Path:
    """Return the path of the shared library, which is compiled unless it is there already."""
    compiler = _compiler()
    # Machines with different processors may share a home; an upgrade keeps the compiler's path.
    made_by = _hash(_output(compiler, "--version"), *map(str.encode, sorted(cpu_flags())))
    file_name = f"native-{_digest(folder, options)}-{made_by}.so"
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        library = Path(home) / "drafthouse" / file_name
        if library.is_file():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        # The target and its drafters start together: one of them compiles, the others wait for it.
        with open(library.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return library if library.is_file() else _compiled(compiler, options, folder, library)
    except (OSError, RuntimeError):  # no home, or none to write to, as in some containers
        elsewhere = Path(tempfile.mkdtemp(prefix="drafthouse-"))
        return _compiled(compiler, options, folder, elsewhere / file_name)


def _compiled(compiler: str, options: Sequence[str], folder: Path, library: Path) -> Path:
    told = {"phase": "build", "folder": folder.parent.name}
    log.info("phase %(phase)s: native code of %(folder)s, once on this machine", told)
    fresh = library.with_suffix(".new")
    _output(compiler, *_OPTIONS, *options, "-o", fresh, *sorted(folder.glob("*.cpp")))
    os.replace(fresh, library)  # at once: another process may be loading it
    return library


def _output(*command: str | Path) -> bytes:
    done = subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
    return done.stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{error.cmd[0]} failed: {lines[0] if lines else error.returncode}"
    return str(error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the native code ahead.")
    parser.add_argument("package", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--machine", default=platform.machine(), help="as `uname -m` says")
    arguments = parser.parse_args()
    try:
        for made in compile_ahead(arguments.package, machine=arguments.machine):
            sys.stdout.write(f"{made}\n")
    except (OSError, subprocess.SubprocessError) as failure:
        sys.exit(_reason(failure))
