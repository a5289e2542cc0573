"""Settings of the LM drafter; apart from it, so that checking a configuration needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.config.schema import EngineConfig
from cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LMOptions:
    """A draft model, and how its trees grow.

    engine: the draft model and its device.
    num_candidates: the most probable tokens of a node that are ranked with the target's noise.
    num_children: the best of them, which become nodes.
    width: nodes expanded per forward pass and request.
    max_rows: nodes expanded per forward pass over all requests.
    expanded_per_node: in the pool, nodes expanded for each node that is asked for.  The additional
    ones let the tree go on after the next commit; a drafter with a device of its own can afford
    many.  Inside the target a leaf is expanded where it may have a child among the nodes asked for.
    min_survival: nodes less likely than this are neither expanded nor proposed.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    num_candidates: int = 32
    num_children: int = 4
    width: int = 8
    max_rows: int = 64
    expanded_per_node: int = 2
    min_survival: float = 0.004

    def __post_init__(self) -> None:
        check_growth(self)


def check_growth(options: Any) -> None:
    """Raise ConfigError for a bad value of those settings of growth that `options` has."""
    for name in ("num_candidates", "num_children", "width", "max_rows", "expanded_per_node"):
        if getattr(options, name, 1) < 1:
            raise ConfigError(f"{name}: {getattr(options, name)} is below 1", param=name)
    if options.num_children > options.num_candidates:
        raise ConfigError(
            f"num_children: {options.num_children} exceeds num_candidates, "
            f"{options.num_candidates}; children are the best candidates",
            param="num_children",
        )
    if not 0.0 < options.min_survival < 1.0:
        raise ConfigError(
            f"min_survival: {options.min_survival} is not between 0 and 1", param="min_survival"
        )
