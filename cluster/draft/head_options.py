"""Settings of the drafters that run a draft head; no torch is needed to check them."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.draft.lm_options import check_growth
from cluster.errors import ConfigError

# The kinds whose `model`, where it is not empty, is the folder of a draft head.
HEAD_KINDS = ("eagle3", "peagle", "medusa", "block", "early_exit")


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """An EAGLE-3 head, and how its trees grow.

    model: the head's folder, or its name on the Hugging Face hub, owner/name@revision.
    num_candidates: the most probable tokens of a node that are ranked with the target's noise.
    num_children: the best of them, which become nodes.
    width: nodes expanded per pass and request.
    max_rows: nodes expanded per pass over all requests.
    min_survival: nodes less likely than this are neither expanded nor proposed.
    context: last tokens of a text that the head attends to; it was trained on texts about as long.
    """

    model: str = ""
    num_candidates: int = 32
    num_children: int = 4
    width: int = 8
    max_rows: int = 64
    min_survival: float = 0.01
    context: int = 2048

    def __post_init__(self) -> None:
        _check_model(self.model)
        check_growth(self)
        if self.context < 1:
            raise ConfigError(f"context: {self.context} is below 1", param="context")


@dataclass(frozen=True, slots=True)
class MtpOptions(Eagle3Options):
    """The multi-token-prediction layer in the target's checkpoint, and how its trees grow.

    model: the target's folder or name, as target.engine.model says it.
    num_candidates: the most probable tokens of a node that are ranked with the target's noise.
    num_children: the best of them, which become nodes.
    width: nodes expanded per pass and request.
    max_rows: nodes expanded per pass over all requests.
    min_survival: nodes less likely than this are neither expanded nor proposed.
    context: last tokens of a text that the layer attends to.
    """


@dataclass(frozen=True, slots=True)
class ProductOptions:
    """A head that drafts several positions in one pass, and the trees of their products."""

    model: str = ""
    num_candidates: int = 32
    num_children: int = 6
    min_survival: float = 0.01

    def __post_init__(self) -> None:
        _check_model(self.model)
        check_growth(self)


@dataclass(frozen=True, slots=True)
class MedusaOptions(ProductOptions):
    """Medusa heads, and the trees of their products.

    model: the heads' folder, or its name on the Hugging Face hub, owner/name@revision.
    num_candidates: the most probable tokens of a head that are ranked with the target's noise.
    num_children: the best of them, which become children of every node before it.
    min_survival: less likely nodes are left out.
    """


@dataclass(frozen=True, slots=True)
class PeagleOptions(ProductOptions):
    """A P-EAGLE head, and the trees of the product of its rows.

    model: the head's folder, or its name on the Hugging Face hub, owner/name@revision.
    num_candidates: the most probable tokens of a row that are ranked with the target's noise.
    num_children: the best of them, which become children of every node before it.
    min_survival: less likely nodes are left out.
    num_drafts: rows of a pass, so many tokens ahead; 0 = as many as the folder says, or 7.
    context: last tokens of a text that the head attends to; it was trained on texts about as long.
    """

    num_drafts: int = 0
    context: int = 2048

    def __post_init__(self) -> None:
        _check_model(self.model)
        check_growth(self)
        for name, least in (("num_drafts", 0), ("context", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)} is below {least}", param=name)


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """A DFlash or DSpark drafter, which drafts a block in one pass.

    model: the drafter's folder, or its name on the Hugging Face hub, owner/name@revision.
    num_candidates: the most probable tokens of a row that are ranked with the target's noise.
    context: last tokens of a text that the block attends to.
    """

    model: str = ""
    num_candidates: int = 32
    context: int = 4096

    def __post_init__(self) -> None:
        _check_model(self.model)
        for name in ("num_candidates", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1", param=name)


def _check_model(model: str) -> None:
    if not model:
        raise ConfigError("model: missing; name the draft head's folder", param="model")
