"""The hashes by which a worker names its model in Describe."""

from __future__ import annotations

from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash, model_hash
from cluster.models.made_for import served_hash
from cluster.records import frozen


@frozen
class Identity:
    """model_hash and tokenizer_hash as in `cluster.models.fingerprint`, the former as served; the
    latter is "" for a model folder without a tokenizer."""

    model_hash: str
    tokenizer_hash: str


def identify(folder: str, weights: str) -> Identity:
    """Hashes of a model's folder.  weights: `LoadedModel.weights`."""
    try:
        tokenizer = folder_tokenizer_hash(folder)
    except ConfigError:  # a drafter may come without one; it then serves any vocabulary
        tokenizer = ""
    return Identity(served_hash(model_hash(folder), weights), tokenizer)
