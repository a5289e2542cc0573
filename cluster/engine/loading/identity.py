"""What a worker says of its model in Describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers.utils import cached_file

from cluster.errors import ConfigError
from cluster.fingerprint import folder_tokenizer_hash, model_hash


@dataclass(frozen=True, slots=True)
class Identity:
    """model_hash and tokenizer_hash as in `cluster.fingerprint`; tokenizer_hash is "" for a model
    folder without a tokenizer."""

    model_hash: str
    tokenizer_hash: str


def identify(source: str) -> Identity:
    """Hashes of a model folder, or of the local snapshot of a hub model that has been loaded."""
    folder = Path(source)
    if not folder.is_dir():
        config_file = cached_file(source, "config.json")
        assert config_file is not None, "a loaded model has its config in the local hub cache"
        folder = Path(config_file).parent
    try:
        tokenizer = folder_tokenizer_hash(folder)
    except ConfigError:  # a drafter may come without one; it then serves any vocabulary
        tokenizer = ""
    return Identity(model_hash(folder), tokenizer)
