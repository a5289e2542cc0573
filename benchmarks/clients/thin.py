"""Measures the cost of installing the thin client: seconds of pip into an empty environment, and
seconds of the import.

    python -m benchmarks.clients.thin

Needs an index with grpcio and protobuf; the rest is built here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from benchmarks.support.record import OUT, ROOT, show_report

_PATIENCE_S = 300.0
_IMPORT = (
    "import time; started_at = time.perf_counter(); import drafthouse_client;"
    " print(time.perf_counter() - started_at)"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients.thin", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="imports, each in a new process")
    parser.add_argument("--out", type=Path, default=OUT / "clients" / "thin.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), options.repeats)
    show_report(options.out, {"settings": {"repeats": options.repeats}, "summary": report})


def measure(folder: Path, repeats: int) -> dict[str, object]:
    """Measure the seconds of the installation and of each import, and list the new packages."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT / "cluster" / "client",
        check=True,
        capture_output=True,
        timeout=_PATIENCE_S,
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "empty", with_pip=True)
    python = str(folder / "empty" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    started_at = time.perf_counter()
    subprocess.run(
        [*pip, "install", "-q", str(wheel)], check=True, capture_output=True, timeout=_PATIENCE_S
    )
    install_s = time.perf_counter() - started_at
    imports = [float(_output(python, "-c", _IMPORT)) for _ in range(repeats)]
    installed = _output(*pip, "list", "--format=freeze").split()
    return {
        "install_s": round(install_s, 2),
        "wheel_bytes": wheel.stat().st_size,
        "first_import_s": round(imports[0], 3),
        "import_s": round(min(imports), 3),
        "installed": [line for line in installed if not line.startswith(("pip=", "setuptools="))],
    }


def _output(*words: str) -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
    return done.stdout


if __name__ == "__main__":
    main()
