"""Counts the lines of what reads requests, and of the benchmarks: `python -m tests.support.sizes`.

The models of requests stand in the same modules as their readers; all of both are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
_INGRESS = "deployments/ingress"
REQUESTS = (
    *(f"{_INGRESS}/{name}.py" for name in (
        "chat", "fields", "grpc_request", "openai_request", "sampling", "speculation",
        "structured", "tools",
    )),
    *(f"{_INGRESS}/api/{name}.py" for name in (
        "contract", "messages", "openapi", "response_request", "wording",
    )),
    "docs/tools/api.py",
)  # fmt: skip


def lines(paths: Iterable[Path]) -> int:
    """How many lines these files have together."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


if __name__ == "__main__":
    sizes = {
        "requests": lines(ROOT / name for name in REQUESTS),
        "benchmarks": lines((ROOT / "benchmarks").rglob("*.py")),
    }
    sys.stdout.writelines(f"{name} {count}\n" for name, count in sizes.items())
