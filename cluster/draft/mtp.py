"""The multi-token-prediction drafter: the layer that the target's own checkpoint brings for it.

It drafts as an EAGLE-3 head does, from the rows behind the target's final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.draft.eagle3 import Eagle3Drafter
from cluster.draft.head_cache import layers
from cluster.draft.head_options import Eagle3Options
from cluster.draft.heads import mtp
from cluster.draft.heads.ready import ReadyHead, made_ready, target_shape
from cluster.draft.inside import Host
from cluster.engine.types import LayerSpec
from cluster.models.made_for import MadeFor
from cluster.models.resolve import resolve


class MtpDrafter(Eagle3Drafter):
    """See `Eagle3Drafter`."""

    kind = "mtp"

    def _ready(self, options: Eagle3Options, host: Host) -> ReadyHead[Any]:
        head = mtp.load(resolve(options.model), target_shape(host), host.weight)
        return made_ready(head, host, MadeFor())  # it lies in the target's own folder

    @classmethod
    def kv_layers(cls, options: Eagle3Options, like: LayerSpec) -> Sequence[LayerSpec]:
        """See `StepReader`."""
        layer = mtp.layer_of(resolve(options.model))
        return layers(layer, like)
