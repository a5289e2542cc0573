"""Measures how the cells change when a constant of the loop is halved or doubled.

The constants are those that the sources of the loop define: numbers bound to names in capitals at
the top of a module.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.replay.grid import Bench, Found

# The modules of the control loop and those that it is built on.
_SOURCES = (
    "cluster/plan/*.py", "cluster/spec/acceptance.py", "cluster/spec/survival.py",
    "cluster/spec/evidence.py",
)  # fmt: skip
# Versions of records, numbers of bins and widths of formats are not tuned.
_NO_CHOICES = ("VERSION", "BINS", "MAX_DRAFTERS")
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Constant:
    """A tuned number.  module: the module from which the loop reads it."""

    module: str
    attribute: str
    value: float

    @property
    def name(self) -> str:
        return f"{self.module.removeprefix('cluster.')}.{self.attribute}"


def constants() -> list[Constant]:
    """All tuned numbers of the loop."""
    paths = [path for pattern in _SOURCES for path in sorted(_REPOSITORY.glob(pattern))]
    return [each for path in paths for each in _in_source(path)]


def _in_source(path: Path) -> Iterator[Constant]:
    module = ".".join(path.relative_to(_REPOSITORY).with_suffix("").parts)
    for node in ast.parse(path.read_text("utf-8")).body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        name, value = node.targets[0].id, node.value
        if not isinstance(value, ast.Constant) or not isinstance(value.value, int | float):
            continue
        if name.isupper() and not any(each in name for each in _NO_CHOICES):
            yield Constant(module, name, float(value.value))


def changed(bench: Bench, usual: Sequence[Found], constant: Constant, factor: float) -> float:
    """The greatest relative change of any cell, signed, with the constant times `factor`."""
    module = importlib.import_module(constant.module)
    former = getattr(module, constant.attribute)
    setattr(module, constant.attribute, type(former)(former * factor))
    try:
        changes = [bench.run(found.cell).adaptive / found.adaptive - 1.0 for found in usual]
    finally:
        setattr(module, constant.attribute, former)
    return max(changes, key=abs)
