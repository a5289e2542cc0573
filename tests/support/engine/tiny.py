"""The engine's settings for a tiny checkpoint."""

from pathlib import Path
from typing import Any

from cluster.config.schema import EngineConfig


def tiny(folder: Path, settings: dict[str, Any], **defaults: Any) -> EngineConfig:
    """float32 on the CPU, with few pages.  settings: go before what a kind of tests has."""
    known = {"dtype": "float32", "device": "cpu", "num_pages": 256, **defaults, **settings}
    return EngineConfig(model=str(folder), **known)
