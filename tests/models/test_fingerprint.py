"""Fingerprints distinguish vocabularies and checkpoints, and nothing else."""

import hashlib
import json
from pathlib import Path

from cluster.models.fingerprint import model_hash, token_strings, tokenizer_hash
from tests.support.errors import config_error


def test_strings_are_listed_by_id_with_gaps_left_empty_whatever_their_order():
    assert token_strings({"c": 3, "a": 0, "b": 1}) == ["a", "b", "", "c"]
    assert token_strings({}) == []
    assert token_strings({"b": 0, "a": 0}) == token_strings({"a": 0, "b": 0}) == ["a"]


def test_the_tokenizer_hash_is_the_published_one():
    # Each string's UTF-8 after its length as four little-endian bytes.
    published = hashlib.sha256(b"\x01\0\0\0a\x02\0\0\0\xc3\xa9").hexdigest()
    assert tokenizer_hash(["a", "é"]) == published
    # Lone surrogates too have a hash.
    assert tokenizer_hash(["\ud800"]) != tokenizer_hash(["?"])


def checkpoint(folder: Path, config: dict[str, object], weights: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_checkpoint_is_recognised_by_its_weights_and_config_in_any_folder(tmp_path: Path):
    weights = bytes(range(256)) * 1000
    config = {"hidden_size": 8, "transformers_version": "5.0"}
    here, there, *others = (
        model_hash(checkpoint(tmp_path / str(number), config | changes, given))
        for number, (changes, given) in enumerate(
            [
                ({}, weights),
                ({"transformers_version": "5.1"}, weights),
                ({}, weights[:-1] + b"\x00"),
                ({}, weights[::-1]),
                ({"hidden_size": 9}, weights),
                ({}, b""),
            ]
        )
    )
    assert here == there
    assert len({here, *others}) == 5


def test_a_folder_without_config_is_a_configuration_error(tmp_path: Path):
    with config_error(r"config\.json"):
        model_hash(tmp_path)
