"""The version of a drafter's model: which weights they are, and how old."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from cluster.models.fingerprint import model_hash, written_at
from cluster.records import frozen


@frozen
class ModelVersion:
    """model_hash: `fingerprint.model_hash` of its folder, "" = the drafter has no model of its own.
    written_at: see `fingerprint.written_at`."""

    model_hash: str = ""
    written_at: float = 0.0


NO_MODEL = ModelVersion()


def version_of(folders: Sequence[Path]) -> ModelVersion:
    """The version of a drafter with the models in these folders; the oldest of several counts."""
    if not folders:
        return NO_MODEL
    hashes = [model_hash(folder) for folder in folders]
    joined = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return ModelVersion(joined, min(map(written_at, folders)))
