"""A trained drafter's note of its target."""

from __future__ import annotations

from cluster.models.fingerprint import model_hash
from cluster.models.made_for import MadeFor
from cluster.models.names import served_name
from cluster.models.resolve import resolve


def target_of(model: str) -> MadeFor:
    """The target of a training, by its name or folder."""
    return MadeFor(served_name(model), model_hash(resolve(model)))
