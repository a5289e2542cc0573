"""What can be said of a model folder without loading it: whether it is there, and how large."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import Config, EngineConfig
from cluster.config_parse import parse
from cluster.errors import ConfigError

_REPOSITORY = Path(__file__).resolve().parents[1]
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """weights: bytes of the weights as they will be loaded.  kv_per_token: bytes of KV cache."""

    weights: int
    kv_per_token: int


def engines(config: Config) -> dict[str, EngineConfig]:
    """Every engine that `config` starts: configuration path to its settings."""
    found = {"target.engine": config.target.engine}
    for name, drafter in config.drafters.items():
        options = drafter.options.get("engine")
        if options is not None:
            path = f"drafters.{name}.options.engine"
            found[path] = parse(EngineConfig, options, path)
    return found


def find_folder(model: str) -> Path | None:
    """The model's folder: absolute, below the working directory or below the repository."""
    for folder in (Path(model).expanduser(), _REPOSITORY / model):
        if (folder / "config.json").is_file():
            return folder.resolve()
    return None


def tokenizer_folder(model: str) -> Path:
    """The model's folder, or a local snapshot of the tokenizer's files of a hub model."""
    folder = find_folder(model)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja", "*.model"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target.engine.model: {model!r} is no folder here and cannot be fetched: {error}",
            param="target.engine.model",
        ) from error


def check_folders(config: Config) -> None:
    """Raise ConfigError for a model that is meant to be a folder and is none.

    A name such as `org/model` is taken for one on the Hugging Face hub, unless a folder `org`
    lies here: then it is a path with a slip in it.
    """
    for path, engine in engines(config).items():
        if find_folder(engine.model) is not None:
            continue
        parts = Path(engine.model).parts
        is_hub_name = (
            not engine.model.startswith("/")
            and len(parts) in (1, 2)
            and parts[0] not in (".", "..", "~")
            and not Path(parts[0]).exists()
        )
        if not is_hub_name:
            name = f"{path}.model"
            raise ConfigError(
                f"{name}: {engine.model!r} holds no config.json; correct the path, or run from the "
                "folder it is relative to",
                param=name,
            )


def estimate(engine: EngineConfig) -> MemoryEstimate | None:
    """What the engine will need, None for a model that is not on this machine."""
    folder = find_folder(engine.model)
    if folder is None:
        return None
    try:
        described: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    stored = str(described.get("dtype") or described.get("torch_dtype") or "float32")
    dtype = stored if engine.dtype == "auto" else engine.dtype
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    width = _BYTES.get(dtype, 4)
    layers = int(described.get("num_hidden_layers") or described.get("n_layer") or 0)
    heads = int(described.get("num_attention_heads") or described.get("n_head") or 1)
    hidden = int(described.get("hidden_size") or described.get("n_embd") or 0)
    kv_heads = int(described.get("num_key_value_heads") or heads)
    head_dim = int(described.get("head_dim") or hidden // heads)
    return MemoryEstimate(
        weights=size * width // _BYTES.get(stored, 4),
        kv_per_token=2 * layers * kv_heads * head_dim * width,
    )
