"""What becomes of the cells when a constant of the loop is halved or doubled."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replay.grid import Bench, Found


@dataclass(frozen=True, slots=True)
class Constant:
    """module: where the loop reads it."""

    module: str
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.module.rsplit('.', 1)[1]}.{self.attribute}"

    @property
    def value(self) -> float:
        return float(getattr(importlib.import_module(self.module), self.attribute))


_BY_MODULE = {
    "cluster.spec.step_cost": (
        "_NUM_SAMPLES", "_NEIGHBOUR", "_HALF_LIFE", "_KNEE_ROWS", "_DRAFT_BASE",
    ),
    "cluster.spec.acceptance": (
        "_HALF_LIFE", "_PRIOR_TREES", "_WEIGHED_RANK", "_LEAST_WEIGHT",
    ),
    "cluster.spec.evidence": ("RECENT", "FEW", "FIRST_TRIES"),
    "cluster.spec.throttle": (
        "_FIRST_BACKOFF_S", "_LAST_BACKOFF_S", "_BEYOND_DOUBT", "_MOST_ROUNDS",
    ),
    "cluster.plan.load": ("_EXPLORED_SHARE", "_FIRST_SHARE"),
    "cluster.plan.step_choice": (
        "_TIMID_SHARE", "_MARGIN", "_HOPELESS", "LOOK_INTERVAL", "_STALE_STEPS", "_PLAIN_COST",
        "FIRST_NODES",
    ),
    "cluster.plan.controller": ("_MAX_SEEN",),
    "cluster.plan.texts": ("_MAX_SEEN",),
}  # fmt: skip
CONSTANTS = [
    Constant(module, attribute)
    for module, attributes in _BY_MODULE.items()
    for attribute in attributes
]


def changed(bench: Bench, usual: Sequence[Found], constant: Constant, factor: float) -> float:
    """The greatest relative change of any cell, signed, with the constant times `factor`."""
    module = importlib.import_module(constant.module)
    former = getattr(module, constant.attribute)
    value = former * factor
    setattr(module, constant.attribute, type(former)(value))
    try:
        changes = [bench.run(found.cell).adaptive / found.adaptive - 1.0 for found in usual]
    finally:
        setattr(module, constant.attribute, former)
    return max(changes, key=abs)
