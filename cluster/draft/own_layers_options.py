"""Settings of the drafters made of the target's own layers; apart from them, so that checking a
configuration needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from cluster.config.parse import NonNegativeInt, OpenShare, PositiveInt
from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor
from cluster.records import frozen

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
        if not self.exit_layer and not self.model:
            reason = "0 layers cannot draft; name how many of the target's first layers do"
            raise ConfigError.at("exit_layer", reason)

    def layers(self, num_layers: int) -> Sequence[int]:
        """Those that draft, of a target of so many; raises ConfigError where it has too few."""
        if self.exit_layer >= num_layers:
            reason = f"{self.exit_layer} is not below the {num_layers} layers of the target"
            raise ConfigError.at("exit_layer", reason)
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
        if not self.skip_layers:
            raise ConfigError.at(
                "skip_layers",
                "none is skipped, which drafts at the target's own cost; find some by `drafthouse "
                "train layer-skip`",
            )
        if len(set(self.skip_layers)) < len(self.skip_layers):
            raise ConfigError.at("skip_layers", f"{list(self.skip_layers)} names a layer twice")

    def layers(self, num_layers: int) -> Sequence[int]:
        """Those that draft, of a target of so many; raises ConfigError for layers it has not."""
        foreign = [each for each in self.skip_layers if not 0 <= each < num_layers]
        if foreign or len(self.skip_layers) == num_layers:
            what = f"{foreign[0]} is none" if foreign else "they are all"
            reason = f"{what} of the target's {num_layers} layers, 0 to {num_layers - 1}"
            raise ConfigError.at("skip_layers", reason)
        return [each for each in range(num_layers) if each not in self.skip_layers]
