"""The hashes by which a worker names its model in Describe."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash, model_hash


@dataclass(frozen=True, slots=True)
class Identity:
    """model_hash and tokenizer_hash as in `cluster.models.fingerprint`; the latter is "" for a
    model folder without a tokenizer."""

    model_hash: str
    tokenizer_hash: str


def identify(folder: str) -> Identity:
    """Hashes of a model's folder."""
    try:
        tokenizer = folder_tokenizer_hash(folder)
    except ConfigError:  # a drafter may come without one; it then serves any vocabulary
        tokenizer = ""
    return Identity(model_hash(folder), tokenizer)
