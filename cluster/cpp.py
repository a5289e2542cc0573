"""C++ sources of this package, compiled once per machine and then loaded.

It serves functions that must be faster than any library.  Each has a slower equivalent, so
everything also runs without a compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_COMPILERS = ("g++", "clang++", "c++")
_OPTIONS = (
    "-std=c++17", "-O2", "-march=native", "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti",
    "-fPIC", "-shared", "-pthread",
)  # fmt: skip
# The options of `make check-native`; the process must preload the sanitizer's library.
_SANITIZED = (
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g",
)  # fmt: skip
_COMPILE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Native:
    """A loaded library.

    build: identifies everything that determines its machine code (sources, options, compiler,
    processor); libraries of different builds may round differently.
    """

    library: ctypes.CDLL
    build: str


def load(
    folder: Path, names: Sequence[str], structures: Mapping[str, type[ctypes.Structure]]
) -> Native | None:
    """Compile and load these sources; returns None, with a line in the log, if that fails.

    structures: the structures that are passed to its functions, by their C++ names; `struct_size`
    in the sources returns their sizes.  DRAFTHOUSE_NATIVE=0 turns native code off, "sanitized"
    checks its memory accesses.  Libraries are kept in $XDG_CACHE_HOME/drafthouse under their build.
    """
    mode = os.environ.get("DRAFTHOUSE_NATIVE")
    if mode == "0":
        return None
    options = (*_OPTIONS, *_SANITIZED) if mode == "sanitized" else _OPTIONS
    try:
        path = _built(folder, names, options)
        library = ctypes.CDLL(str(path))
        _compare_sizes(library, structures)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        log.info(
            "no native code of %s, the slow way is taken: %s", folder.parent.name, _reason(error)
        )
        return None
    return Native(library, path.stem.removeprefix("native-"))


def _compare_sizes(library: ctypes.CDLL, structures: Mapping[str, type[ctypes.Structure]]) -> None:
    """Raise OSError where C++ and Python lay a structure out differently."""
    if not structures:
        return
    library.struct_size.argtypes = [ctypes.c_char_p]
    library.struct_size.restype = ctypes.c_int64
    for name, structure in structures.items():
        there, here = library.struct_size(name.encode()), ctypes.sizeof(structure)
        if there != here:
            raise OSError(f"{name} has {there} bytes in C++ and {here} in Python")


@cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of the first CPU as the kernel lists them; empty if it does not."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        log.debug("this system has no /proc/cpuinfo")
    return frozenset()


def _built(folder: Path, names: Sequence[str], options: Sequence[str]) -> Path:
    """Return the path of the shared library, which is compiled unless it is there already."""
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError("there is no C++ compiler; on Debian and Ubuntu: apt install g++")
    told = hashlib.sha256()
    for name in names:
        told.update((folder / name).read_bytes())
    # -march=native depends on the processor, and machines with different ones may share a home.
    told.update(" ".join((compiler, *options, *sorted(cpu_flags()))).encode())
    told.update(_version(compiler))
    command = (compiler, *options)
    sources = [str(folder / name) for name in names if name.endswith(".cpp")]
    file_name = f"native-{told.hexdigest()[:16]}.so"
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        library = Path(home) / "drafthouse" / file_name
        if library.is_file():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        # The target and its drafters start together: one of them compiles, the others wait for it.
        with open(library.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if library.is_file():
                return library
            with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
                fresh = Path(scratch) / library.name
                return _compiled(command, sources, fresh, library)
    except (OSError, RuntimeError):  # no home, or none to write to, as in some containers
        scratch_folder = Path(tempfile.mkdtemp(prefix="drafthouse-"))
        return _compiled(command, sources, scratch_folder / "new.so", scratch_folder / file_name)


def _version(compiler: str) -> bytes:
    """Return the compiler's version text, because an upgrade does not change the path."""
    command = [compiler, "--version"]
    return subprocess.run(
        command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S
    ).stdout


def _compiled(command: Sequence[str], sources: Sequence[str], fresh: Path, library: Path) -> Path:
    subprocess.run(
        [*command, "-o", str(fresh), *sources],
        check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S,
    )  # fmt: skip
    os.replace(fresh, library)  # at once: another process may be loading it
    return library


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{error.cmd[0]} failed: {lines[0] if lines else error.returncode}"
    return str(error)
