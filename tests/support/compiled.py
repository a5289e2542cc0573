"""Native code that tests run, compiled once: kept beside the product's own, by its sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster import cpp
from cluster.engine.cpu import kernels

CPU = Path(kernels.__file__).parent
SOURCES = tuple(sorted(CPU.glob("*.cpp")))


def program(compiler: str, *words: str | Path, header: Path | None = None) -> Path:
    """What a compiler makes of these files and options, beside our kernels' headers.

    header: another one that an option names."""
    files = [word for word in (*words, header) if isinstance(word, Path)]
    # -march=native depends on the processor, and machines with different ones may share a home.
    made_of = *map(str, words), *(each.read_bytes() for each in files), sorted(cpp.cpu_flags())

    def make(folder: Path) -> None:
        command = [compiler, f"-I{CPU}", *words, "-o", folder / "made"]
        subprocess.run(command, check=True, timeout=900)

    return (
        _kept(make, compiler, cpp._output(compiler, "--version"), cpp._digest(CPU, ()), made_of)
        / "made"
    )


def ahead(folder: Path, processors: Sequence[cpp.Processor], machine: str) -> Path:
    """A copy of a folder of sources, with what is compiled ahead of them."""

    def make(place: Path) -> None:
        ignored = shutil.ignore_patterns("ahead", "__pycache__")
        shutil.copytree(folder, place / folder.name, ignore=ignored)
        assert list(cpp.compile_ahead(place, processors, machine))

    version, digest = cpp._output(cpp._compiler(machine), "--version"), cpp._digest(folder, ())
    kinds = [(each.name, each.options) for each in processors]
    return _kept(make, machine, version, digest, kinds) / folder.name


def _kept(make: Callable[[Path], None], *made_of: object) -> Path:
    """A folder that `make` fills, if none was filled of the same before."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafthouse"
    home.mkdir(parents=True, exist_ok=True)
    folder = home / f"tests-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"
    # Several workers of pytest may want the same: one of them compiles, the others wait for it.
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=home) as scratch:
                fresh = Path(scratch) / "fresh"
                fresh.mkdir()
                make(fresh)
                fresh.rename(folder)
    return folder
