"""The tokens that end a text, as a model's folder declares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError

GENERATION_CONFIG = "generation_config.json"


def eos_token_ids(model: Path, generation: Path | None = None) -> tuple[int, ...]:
    """Return eos_token_id of the generation config, or of the model's config.json if that has none.

    model: the model's folder.  generation: the folder of the generation config, None = the same.
    Raises ConfigError for an invalid file."""
    for path in ((generation or model) / GENERATION_CONFIG, model / "config.json"):
        value = read_object(path).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, an empty one where there is no file; raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return values
