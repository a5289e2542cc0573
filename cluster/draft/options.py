"""Settings of the drafters that need torch, and of those that are made of others; apart from them,
so that a configuration is checked without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Literal

from cluster.config.parse import (
    Folder,
    NonNegativeInt,
    OpenShare,
    PositiveInt,
    Range,
    Share,
    check_that,
)
from cluster.config.schema import EngineConfig
from cluster.models.made_for import MadeFor
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
        check_that(
            1 <= len(self.drawn_children) <= self.num_candidates,
            "drawn_children",
            "empty; give the children of the root at least",
        )


def check_children(num_children: int, num_candidates: int) -> None:
    """Raise ConfigError for more children than candidates."""
    check_that(
        num_children <= num_candidates,
        "num_children",
        f"{num_children} exceeds num_candidates, {num_candidates}; children are the best "
        "candidates",
    )


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
        check_that(self.model, "model", "missing; name the draft head's folder")
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
    """A DFlash, DFlash-2 or DSpark drafter, which drafts a block in one pass."""

    context: PositiveInt = 4096
    """Last tokens of a text that the block attends to."""


# The kinds that run layers of the target.
OWN_LAYERS = ("early_exit", "layer_skip")


@frozen
class OwnLayersOptions:
    """The settings that both kinds have."""

    width: PositiveInt = 4
    """Nodes expanded per forward pass and request."""
    min_survival: OpenShare = 0.02
    """Nodes less likely than this are neither expanded nor proposed."""


@frozen
class EarlyExitOptions(OwnLayersOptions):
    """The first layers of the target, then its final norm and output layer."""

    exit_layer: NonNegativeInt = 0
    """How many of its layers draft; fewer than it has. 0 = as many as `model` says."""
    model: str = ""
    """The folder of a trained exit (`drafthouse train early-exit`), or its name on the Hugging Face
    hub, owner/name@revision; "" = none."""

    def __post_init__(self) -> None:
        check_that(
            self.exit_layer or self.model,
            "exit_layer",
            "0 layers cannot draft; name how many of the target's first layers do",
        )

    def layers(self, num_layers: int) -> Sequence[int]:
        """Those that draft, of a target of so many; raises ConfigError where it has too few."""
        check_that(
            self.exit_layer < num_layers,
            "exit_layer",
            f"{self.exit_layer} is not below the {num_layers} layers of the target",
        )
        return range(self.exit_layer)


@frozen
class LayerSkipOptions(OwnLayersOptions):
    """The target without some of its layers; `drafthouse train layer-skip` finds which."""

    skip_layers: tuple[NonNegativeInt, ...] = ()
    """Those that do not draft, counted from 0."""
    made_for: MadeFor = field(default_factory=MadeFor)
    """The target that they were found for, as `drafthouse train layer-skip` writes it."""
    num_pages: NonNegativeInt = 0
    """Of its own KV cache, as of an engine; 0 = as many as memory_fraction allows."""
    memory_fraction: OpenShare = 0.1
    """Of what the target has left, for its own KV cache."""

    def __post_init__(self) -> None:
        check_that(
            self.skip_layers,
            "skip_layers",
            "none is skipped, which drafts at the target's own cost; find some by `drafthouse "
            "train layer-skip`",
        )
        check_that(
            len(set(self.skip_layers)) == len(self.skip_layers),
            "skip_layers",
            f"{list(self.skip_layers)} names a layer twice",
        )

    def layers(self, num_layers: int) -> Sequence[int]:
        """Those that draft, of a target of so many; raises ConfigError for layers it has not."""
        foreign = [each for each in self.skip_layers if not 0 <= each < num_layers]
        what = f"{foreign[0]} is none" if foreign else "they are all"
        check_that(
            not foreign and len(self.skip_layers) < num_layers,
            "skip_layers",
            f"{what} of the target's {num_layers} layers, 0 to {num_layers - 1}",
        )
        return [each for each in range(num_layers) if each not in self.skip_layers]


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
    `layer_skip` without a tree of its own behind the text evaluates all nodes in one pass and keeps
    those that are among its own candidates."""
    max_graft: PositiveInt = 16
    """Nodes of a stage's tree that the next one judges."""

    def __post_init__(self) -> None:
        check_that(
            2 <= len(self.stages) == len(set(self.stages)),
            "stages",
            f"{list(self.stages)}: name two drafters or more, each of them once",
        )
        check_that(
            len(self.thresholds) in (0, len(self.stages) - 1),
            "thresholds",
            f"{len(self.thresholds)} are given; give one for each of the "
            f"{len(self.stages) - 1} stages before the last one, or none",
        )

    @property
    def hands_over_below(self) -> tuple[float, ...]:
        """The threshold of each stage; the last one hands nothing over."""
        return (*(self.thresholds or [_THRESHOLD] * (len(self.stages) - 1)), 0.0)


@frozen
class RecorderOptions:
    """Answers with the target's laws, to train drafters on: token ids, which are text. Nothing is
    kept by default; see docs/learning.md."""

    tenants: Literal["none", "unsalted", "all"] = "none"
    """Whose requests are recorded. none = nobody's; unsalted = those without an API key and without
    a `cache_salt`, which are one tenant; all = everybody's, each tenant's apart. What the folder
    has of tenants that this leaves out is deleted."""
    share: Share = 0.1
    """Share of their requests."""
    keep: Literal["memory", "disk"] = "memory"
    """memory = in the target's process, until an operator asks for it by a file named `spill` in
    the folder; disk = in the folder, at once."""
    folder: Folder = ""
    """Where files are written: each tenant's in a folder of its own that only the server's user may
    read. They hold prompts and answers."""
    max_tokens: PositiveInt = 400_000
    """Tokens that are kept of one tenant (prompts, answers and rejected drafts), about 200 bytes
    each; the oldest answers are deleted."""
    max_age_h: Annotated[float, Range(0, is_open=True)] = 72.0
    """Answers are deleted after so many hours."""
    max_tenants: PositiveInt = 8
    """Tenants of which anything is kept; what is kept of the one that has been silent for longest
    is deleted."""

    def __post_init__(self) -> None:
        check_that(
            self.tenants == "none" or self.folder,
            "folder",
            "missing; name the folder where answers are written",
        )
