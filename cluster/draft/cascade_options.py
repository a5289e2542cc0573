"""Settings of a cascade; apart from it, so that checking a configuration needs no torch."""

from __future__ import annotations

from cluster.config.parse import PositiveInt, Share
from cluster.errors import ConfigError
from cluster.records import frozen

# A stage that is not sure of its first token leaves the text to the next one.
_THRESHOLD = 0.5


@frozen
class CascadeOptions:
    """Drafters that draft one after another, from the cheapest to the best."""

    stages: tuple[str, ...] = ()
    """Names of drafters of this configuration, at least two. They draft for the cascade alone, with
    their own options, where it runs."""
    thresholds: tuple[Share, ...] = ()
    """One for each stage but the last; without any, 0.5 each. A stage whose likeliest node has a
    lower survival hands the text over to the next stage, which judges what there is: an `lm` or
    `layer_skip` evaluates all nodes in one pass and keeps those that are among its own candidates.
    A stage of which fewer than this share is kept hands over nothing to judge."""
    max_graft: PositiveInt = 16
    """Nodes of a stage's tree that the next one judges."""

    def __post_init__(self) -> None:
        if len(self.stages) < 2 or len(set(self.stages)) < len(self.stages):
            raise ConfigError.at(
                "stages", f"{list(self.stages)}: name two drafters or more, each of them once"
            )
        if len(self.thresholds) not in (0, len(self.stages) - 1):
            raise ConfigError.at(
                "thresholds",
                f"{len(self.thresholds)} are given; give one for each of the "
                f"{len(self.stages) - 1} stages before the last one, or none",
            )

    @property
    def hands_over_below(self) -> tuple[float, ...]:
        """The threshold of each stage; the last one hands nothing over."""
        return (*(self.thresholds or [_THRESHOLD] * (len(self.stages) - 1)), 0.0)
