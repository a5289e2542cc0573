"""Fingerprints distinguish vocabularies and checkpoints, and nothing else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.models.fingerprint import model_hash, token_strings, tokenizer_hash


def test_strings_are_listed_by_id_with_gaps_left_empty() -> None:
    assert token_strings({"c": 3, "a": 0, "b": 1}) == ["a", "b", "", "c"]
    assert token_strings({}) == []


def test_two_strings_with_one_id_give_the_same_list_in_any_order() -> None:
    assert token_strings({"b": 0, "a": 0}) == token_strings({"a": 0, "b": 0}) == ["a"]


def test_the_tokenizer_hash_is_the_published_one() -> None:
    # Each string's UTF-8 after its length as four little-endian bytes.
    published = hashlib.sha256(b"\x01\0\0\0a\x02\0\0\0\xc3\xa9").hexdigest()
    assert tokenizer_hash(["a", "é"]) == published


def test_lone_surrogates_hash() -> None:
    assert tokenizer_hash(["\ud800"]) != tokenizer_hash(["?"])


def checkpoint(folder: Path, config: dict[str, object], weights: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_checkpoint_is_recognised_in_any_folder(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 1000
    config: dict[str, object] = {"hidden_size": 8, "transformers_version": "5.0"}
    here = checkpoint(tmp_path / "here", config, weights)
    there = checkpoint(tmp_path / "there", config | {"transformers_version": "5.1"}, weights)
    assert model_hash(here) == model_hash(there)


def test_other_weights_or_another_config_change_the_fingerprint(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 1000
    config: dict[str, object] = {"hidden_size": 8}
    hashes = {
        model_hash(checkpoint(tmp_path / "a", config, weights)),
        model_hash(checkpoint(tmp_path / "b", config, weights[:-1] + b"\x00")),
        model_hash(checkpoint(tmp_path / "c", config, weights[::-1])),
        model_hash(checkpoint(tmp_path / "d", {"hidden_size": 9}, weights)),
        model_hash(checkpoint(tmp_path / "e", config, b"")),
    }
    assert len(hashes) == 5


def test_a_folder_without_config_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_hash(tmp_path)
