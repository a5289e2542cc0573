"""Debian's Prometheus, which is no Python package."""

import shutil
from pathlib import Path

from tests.support.choices import absent

# `.ci/run` unpacks the package there.
_UNPACKED = Path(__file__).resolve().parents[2] / "build" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; without it the test is skipped, and fails
    under continuous integration."""
    found = shutil.which(name) or shutil.which(name, path=str(_UNPACKED))
    if found is None:
        absent(f"{name} is not here: install Debian's prometheus, or unpack it as .ci/run does")
    return found
