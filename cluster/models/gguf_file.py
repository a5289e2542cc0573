"""Opens a GGUF file and reads its header; what is cut or incomplete is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader

from cluster.errors import ConfigError


def open_gguf(file: Path) -> GGUFReader:
    """The file, whose tensors are not read yet; raises ConfigError, with the remedy, where it
    cannot be a model of ours."""
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ConfigError(
            f"{file} is cut or is no GGUF file ({error}); copy or download it again", param="model"
        ) from error
    if int(field(reader, "split.count") or 1) > 1:
        raise ConfigError(
            f"{file} is one part of a split model; join the parts with `llama-gguf-split --merge`",
            param="model",
        )
    if field(reader, "tokenizer.ggml.model") is None:
        raise ConfigError(
            f"{file} holds no tokenizer; use the model's safetensors folder", param="model"
        )
    return reader


def field(reader: GGUFReader, key: str) -> Any:
    """A value of the header, None where there is none of that name."""
    found = reader.fields.get(key)
    return None if found is None else found.contents()
