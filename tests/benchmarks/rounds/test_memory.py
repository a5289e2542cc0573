"""How the memory benchmark computes the expected memory and judges the measured one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.rounds.memory import (
    _LIBRARIES,
    figures,
    kv_bytes,
    long_prompts,
    problems,
    weight_bytes,
)
from benchmarks.support.processes import PinnedProcess

MIB = 1 << 20


def test_keys_and_values_of_a_model_with_shared_and_with_own_heads() -> None:
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    assert kv_bytes(config, 10, 2) == 2 * 2 * 4 * 16 * 2 * 10
    shared = {**config, "num_key_value_heads": 1, "head_dim": 8}
    assert kv_bytes(shared, 10, 4) == 2 * 2 * 1 * 8 * 4 * 10


def test_missed_bars_are_reported() -> None:
    report = {"tokens per answer, least": 16, **figures(80 * MIB, 20 * MIB, 50 * MIB, 160 * MIB, 0)}
    assert report["expected"] == 100.0
    assert report["resident less libraries over expected"] == 1.1
    assert report["resident over expected"] == 1.6
    assert problems(report, 16) == []
    assert problems(report, 17) == ["an answer was cut short"]
    more = {**report, **figures(80 * MIB, 20 * MIB, 50 * MIB, 170 * MIB, 0)}
    assert "1.2 of the expected" in problems(more, 16)[0]


def test_long_prompts_are_long_and_differ() -> None:
    tokenizer = AutoTokenizer.from_pretrained("models/demo-target")
    made = long_prompts(3, 500, tokenizer)
    assert [len(prompt.token_ids) for prompt in made] == [500] * 3
    assert len({prompt.token_ids for prompt in made}) == 3
    with pytest.raises(ValueError, match="fewer than 10000000"):
        long_prompts(1, 10_000_000, tokenizer)


def test_the_weights_are_those_on_disk(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 7)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 5)
    (tmp_path / "grouped.safetensors").write_bytes(b"x")  # the same weights in few bits
    (tmp_path / "config.json").write_text("{}")
    assert weight_bytes(tmp_path) == 12


def test_the_libraries_of_a_target_are_there() -> None:
    command = [sys.executable, "-c", _LIBRARIES]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) > 100_000  # KiB: torch alone is more


def test_the_memory_of_a_process_is_its_own(tmp_path: Path) -> None:
    code = "x = bytearray(200 << 20); del x; print('ready', flush=True); input()"
    process = PinnedProcess([sys.executable, "-c", code], [0], tmp_path / "log")
    try:
        assert process.read_line() == "ready"
        now, peak = process.memory_bytes()
    finally:
        process.stop()
    assert peak > 200 * MIB
    assert now < 100 * MIB
