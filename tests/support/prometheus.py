"""Debian's Prometheus, which is no Python package."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

# `.ci/run` unpacks the package there.
_UNPACKED = Path(__file__).resolve().parents[2] / "build" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; without it the test is skipped, and fails
    under continuous integration."""
    found = shutil.which(name) or shutil.which(name, path=str(_UNPACKED))
    if found is not None:
        return found
    why = f"{name} is not here: install Debian's package prometheus, or unpack it as .ci/run does"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)
