"""Settings of the drafters that run a draft head; no torch is needed to check them."""

from __future__ import annotations

from cluster.config.parse import NonNegativeInt, OpenShare, PositiveInt
from cluster.draft.lm_options import check_children
from cluster.errors import ConfigError
from cluster.records import frozen

# The kinds whose `model`, where it is not empty, is the folder of a draft head.
HEAD_KINDS = ("eagle3", "peagle", "medusa", "block", "early_exit")


@frozen
class HeadOptions:
    """A draft head."""

    model: str = ""
    """The folder of the head or heads, or its name on the Hugging Face hub, owner/name@revision."""
    num_candidates: PositiveInt = 32
    """The most probable tokens of a position that are ranked with the target's noise."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError.at("model", "missing; name the draft head's folder")
        check_children(getattr(self, "num_children", 0), self.num_candidates)


@frozen
class Eagle3Options(HeadOptions):
    """An EAGLE-3 head, and how its trees grow."""

    num_children: PositiveInt = 4
    """The best of them, which become nodes."""
    width: PositiveInt = 8
    """Nodes expanded per pass and request."""
    max_rows: PositiveInt = 64
    """Nodes expanded per pass over all requests."""
    min_survival: OpenShare = 0.01
    """Nodes less likely than this are neither expanded nor proposed."""
    context: PositiveInt = 2048
    """Last tokens of a text that the head attends to; it was trained on texts about as long."""


@frozen
class MtpOptions(Eagle3Options):
    """The multi-token-prediction layer in the target's checkpoint, and how its trees grow."""

    model: str = ""
    """The target's folder or name, as target.engine.model says it."""
    context: PositiveInt = 2048
    """Last tokens of a text that the layer attends to."""


@frozen
class MedusaOptions(HeadOptions):
    """Medusa heads, and the trees of their products."""

    num_children: PositiveInt = 6
    """The best of them, which become children of every node before it."""
    min_survival: OpenShare = 0.01
    """Less likely nodes are left out."""


@frozen
class PeagleOptions(MedusaOptions):
    """A P-EAGLE head, and the trees of the product of its rows."""

    num_drafts: NonNegativeInt = 0
    """Rows of a pass, so many tokens ahead; 0 = as many as the folder says, or 7."""
    context: PositiveInt = 2048
    """Last tokens of a text that the head attends to; it was trained on texts about as long."""


@frozen
class BlockOptions(HeadOptions):
    """A DFlash or DSpark drafter, which drafts a block in one pass."""

    context: PositiveInt = 4096
    """Last tokens of a text that the block attends to."""
