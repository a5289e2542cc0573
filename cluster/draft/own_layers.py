"""Self-speculation: some of the target's own layers draft for all of them.

Early exit takes the first layers (Elhoushi et al., "LayerSkip", 2024), layer skipping leaves out a
chosen set (Zhang et al., "Draft & Verify", 2023).  The weights are the target's; keys and values of
the drafting layers are kept once more, in a small cache of their own, because after a skipped layer
they differ from the target's.
"""

from __future__ import annotations

from typing import ClassVar

from cluster.draft.base import DrafterContext
from cluster.draft.inside import host_of
from cluster.draft.lm import LMDrafter
from cluster.draft.lm_options import LMOptions
from cluster.draft.own_layers_options import EarlyExitOptions, LayerSkipOptions
from cluster.errors import ConfigError


class OwnLayersDrafter(LMDrafter):
    """Grows trees as the draft model of `lm` does, on an engine around some of the target's
    layers."""

    kind: ClassVar[str]

    def __init__(
        self, context: DrafterContext, options: EarlyExitOptions | LayerSkipOptions
    ) -> None:
        host = host_of(context.target, context.name, self.kind)
        try:
            layers = options.layers(host.num_layers)
        except ConfigError as error:
            path = f"drafters.{context.name}.options."
            raise ConfigError(path + error.message, param=f"{path}{error.param}") from error
        engine = host.part(layers, options.num_pages, options.memory_fraction)
        growth = LMOptions(
            engine=engine.config,
            width=options.width,
            expanded_per_node=options.expanded_per_node,
            min_survival=options.min_survival,
        )
        super().__init__(context, growth, engine)
        self.made_for = options.made_for_target


class EarlyExitDrafter(OwnLayersDrafter):
    """The first layers of the target, with its final norm and output layer."""

    kind = "early_exit"


class LayerSkipDrafter(OwnLayersDrafter):
    """The target without some of its layers."""

    kind = "layer_skip"
