"""The hashes by which a worker names its model in Describe."""

from __future__ import annotations

from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash, model_hash
from cluster.models.made_for import served_hash


def identify(folder: str, weights: str) -> tuple[str, str]:
    """The hashes of a model and its tokenizer as in `cluster.models.fingerprint`, the former as
    served; the latter is "" for a folder without a tokenizer.  weights: `LoadedModel.weights`."""
    try:
        tokenizer = folder_tokenizer_hash(folder)
    except ConfigError:  # a drafter may come without one; it then serves any vocabulary
        tokenizer = ""
    return served_hash(model_hash(folder), weights), tokenizer
