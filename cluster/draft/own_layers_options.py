"""Settings of the drafters made of the target's own layers; apart from them, so that checking a
configuration needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.errors import ConfigError
from cluster.models.made_for import MadeFor


@dataclass(frozen=True, slots=True)
class OwnLayersOptions:
    """The options of both kinds.

    width: nodes expanded per forward pass and request.
    min_survival: nodes less likely than this are neither expanded nor proposed.
    """

    width: int = 4
    min_survival: float = 0.02

    @property
    def made_for_target(self) -> MadeFor:
        """The target that the choice of layers was made for, as far as it is known."""
        return MadeFor()

    def check(self) -> None:
        """Raises ConfigError for values that no target could serve."""
        if self.width < 1:
            raise ConfigError(f"width: {self.width} is below 1", param="width")
        for name in ("memory_fraction", "min_survival"):
            if not 0.0 < getattr(self, name, 0.5) < 1.0:
                raise ConfigError(
                    f"{name}: {getattr(self, name)} is not between 0 and 1", param=name
                )


@dataclass(frozen=True, slots=True)
class EarlyExitOptions(OwnLayersOptions):
    """The first layers of the target, then its final norm and output layer.

    exit_layer: how many of its layers draft; fewer than it has.  0 = as many as `model` says.
    model: the folder of a trained exit (`drafthouse train early-exit`), or its name on the Hugging
    Face hub, owner/name@revision; "" = none.
    width: nodes expanded per forward pass and request.
    min_survival: nodes less likely than this are neither expanded nor proposed.
    """

    exit_layer: int = 0
    model: str = ""

    def __post_init__(self) -> None:
        self.check()
        if self.exit_layer < (0 if self.model else 1):
            raise ConfigError(
                f"exit_layer: {self.exit_layer} layers cannot draft; name how many of the target's "
                "first layers do",
                param="exit_layer",
            )

    def layers(self, num_layers: int) -> Sequence[int]:
        """Those that draft, of a target of so many; raises ConfigError where it has too few."""
        if self.exit_layer >= num_layers:
            raise ConfigError(
                f"exit_layer: {self.exit_layer} is not below the {num_layers} layers of the target",
                param="exit_layer",
            )
        return range(self.exit_layer)


@dataclass(frozen=True, slots=True)
class LayerSkipOptions(OwnLayersOptions):
    """The target without some of its layers; `drafthouse train layer-skip` finds which.

    skip_layers: those that do not draft, counted from 0.  made_for: the target that they were found
    for, as `drafthouse train layer-skip` writes it.
    num_pages, memory_fraction: of its own KV cache, as of an engine; 0 pages = as many as
    memory_fraction of what the target has left allows.
    width: nodes expanded per forward pass and request.
    min_survival: nodes less likely than this are neither expanded nor proposed.
    """

    skip_layers: tuple[int, ...] = ()
    made_for: MadeFor = field(default_factory=MadeFor)
    num_pages: int = 0
    memory_fraction: float = 0.1

    def __post_init__(self) -> None:
        self.check()
        if not self.skip_layers:
            raise ConfigError(
                "skip_layers: none is skipped, which drafts at the target's own cost; find some by "
                "`drafthouse train layer-skip`",
                param="skip_layers",
            )
        if len(set(self.skip_layers)) < len(self.skip_layers):
            raise ConfigError(
                f"skip_layers: {list(self.skip_layers)} names a layer twice", param="skip_layers"
            )

    @property
    def made_for_target(self) -> MadeFor:
        """See `OwnLayersOptions`."""
        return self.made_for

    def layers(self, num_layers: int) -> Sequence[int]:
        """Those that draft, of a target of so many; raises ConfigError for layers it has not."""
        foreign = [each for each in self.skip_layers if not 0 <= each < num_layers]
        if foreign or len(self.skip_layers) == num_layers:
            what = f"{foreign[0]} is none" if foreign else "they are all"
            raise ConfigError(
                f"skip_layers: {what} of the target's {num_layers} layers, 0 to {num_layers - 1}",
                param="skip_layers",
            )
        return [each for each in range(num_layers) if each not in self.skip_layers]
