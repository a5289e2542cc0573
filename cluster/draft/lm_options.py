"""Settings of the LM drafter; apart from it, so that checking a configuration needs no torch."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from cluster.config.parse import NonNegativeInt, OpenShare, PositiveInt
from cluster.config.schema import EngineConfig
from cluster.errors import ConfigError
from cluster.records import frozen


@frozen
class LMOptions:
    """A draft model, and how its trees grow."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """The draft model and its device."""
    vocabulary: Literal["auto", "own", "intersection"] = "auto"
    """How its tokens and the target's correspond. own = they are the same, or the folder says which
    of them it has. intersection = by their bytes: it reads all texts and writes what both have.
    auto = intersection where it has another tokenizer than the target, own elsewhere."""
    specials: Literal["text", "drop"] = "text"
    """How a model of another vocabulary reads special tokens of the target that it has not: text =
    as they are spelled, drop = not at all."""
    context_window: NonNegativeInt = 0
    """Tokens at the end of a text that the model reads. A full window drops its older half and
    reads the newer one again from position 0, about one row more per token: a model drifts beyond
    the lengths that it was trained on. 0 = as long as the model allows
    (`max_position_embeddings`)."""
    num_candidates: PositiveInt = 32
    """The most probable tokens of a node that are ranked with the target's noise."""
    num_children: PositiveInt = 4
    """The best of them, which become nodes."""
    drawn_children: tuple[PositiveInt, ...] = (2, 1)
    """Under a request's law multi_step, the children of a node by its depth; the last number is for
    all deeper nodes. Their number may not depend on what was drawn. The law rejection drafts
    chains."""
    width: PositiveInt = 8
    """Nodes expanded per forward pass and request."""
    max_rows: PositiveInt = 64
    """Nodes expanded per forward pass over all requests."""
    expanded_per_node: PositiveInt = 2
    """In the pool, nodes expanded for each node that is asked for. The additional ones let the tree
    go on after the next commit; a drafter with a device of its own can afford many. Inside the
    target a leaf is expanded where it may have a child among the nodes asked for."""
    min_survival: OpenShare = 0.004
    """Nodes less likely than this are neither expanded nor proposed."""

    @property
    def num_logit_rows(self) -> int:
        """The most rows of a pass that are drawn from: its nodes, and ends of texts that it reads.

        A stage of a cascade also judges whole trees of the one before."""
        return self.max_rows + self.engine.max_running_sequences

    def __post_init__(self) -> None:
        check_children(self.num_children, self.num_candidates)
        if not 1 <= len(self.drawn_children) <= self.num_candidates:
            raise ConfigError.at("drawn_children", "empty; give the children of the root at least")


def check_children(num_children: int, num_candidates: int) -> None:
    """Raise ConfigError for more children than candidates."""
    if num_children > num_candidates:
        raise ConfigError.at(
            "num_children",
            f"{num_children} exceeds num_candidates, {num_candidates}; children are the best "
            "candidates",
        )
