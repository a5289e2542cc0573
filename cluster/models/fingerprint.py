"""Fingerprints of vocabularies and checkpoints, which peers exchange in Describe and compare.

Comparing sizes is not enough: two vocabularies of 32,000 tokens may number different strings, and a
drafter with the wrong one is wrong in every token.  So the token *strings* are hashed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.models.weights import GROUPED
from cluster.records import frozen

# Keys that transformers writes into config.json and that do not describe the model.
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version", "_commit_hash")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096


def token_strings(vocabulary: Mapping[str, int]) -> list[str]:
    """The strings of a vocabulary in id order; unused ids are empty strings."""
    strings = [""] * (max(vocabulary.values(), default=-1) + 1)
    # If two strings share an id, the smaller one is used, whatever their order in the mapping.
    for string, token_id in sorted(vocabulary.items(), reverse=True):
        strings[token_id] = string
    return strings


def tokenizer_hash(strings: Iterable[str]) -> str:
    """SHA-256, in hex, over token strings in id order (`token_strings`), added tokens included."""
    digest = hashlib.sha256()
    for string in strings:
        # surrogatepass: some vocabularies hold lone surrogates, and they must hash, not raise.
        encoded = string.encode("utf-8", errors="surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def folder_tokenizer_hash(folder: str | Path) -> str:
    """`tokenizer_hash` of a Hugging Face folder; raises ConfigError if it has no tokenizer."""
    return tokenizer_hash(token_strings(load_pretrained_tokenizer(folder).get_vocab()))


def load_pretrained_tokenizer(folder: str | Path) -> Any:
    """Load the transformers tokenizer of a folder, without torch if it has tokenizer.json.

    tokenizer.json is the whole tokenizer, so the generic class reads it exactly.  AutoTokenizer
    imports torch, so it is used only for folders that must be converted first.
    """
    folder = Path(folder)
    try:
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"{folder}: no tokenizer can be loaded ({error}); put the model's tokenizer.json there"
        ) from error


def difference(strings: Sequence[str], others: Sequence[str]) -> str:
    """Where two vocabularies first differ, for messages; "" if they are the same."""
    if tokenizer_hash(strings) == tokenizer_hash(others):
        return ""
    pairs = enumerate(zip(strings, others, strict=False))
    index = next((i for i, (mine, theirs) in pairs if mine != theirs), None)
    if index is None:
        return f"{len(strings)} tokens against {len(others)}"
    return f"token {index} is {strings[index]!r} against {others[index]!r}"


def model_hash(folder: str | Path) -> str:
    """SHA-256, in hex, that identifies a checkpoint: its config and samples of its weights.

    Reads sizes and a fixed number of evenly spaced blocks of every weights file, so it takes
    milliseconds for any size.  It distinguishes fine-tunes but does not prove integrity.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    digest.update(_stable_config(folder / "config.json"))
    for path in (path for path in _weights_of(folder) if path.name != GROUPED):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def written_at(folder: str | Path) -> float:
    """When the newest file of a checkpoint's weights was written, in seconds since 1970, by the
    times of its files; 0 where there is none."""
    return max((path.stat().st_mtime for path in _weights_of(Path(folder))), default=0.0)


def _weights_of(folder: Path) -> list[Path]:
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def _stable_config(path: Path) -> bytes:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable model config: {error}") from error
    stable = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    return json.dumps(stable, sort_keys=True).encode()


# The version of a drafter's model: which weights they are, and how old.


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
