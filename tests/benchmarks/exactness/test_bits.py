"""Bits per byte by the engine are those of transformers, formats are compared with one, texts with
each other."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.exactness.bits import bits_per_byte, excerpts, with_differences
from benchmarks.exactness.equality import problems
from tests.support.engine.driver import laws_of, load_engine, load_oracle


def test_every_token_but_the_first_is_scored_after_those_before_it(llama_folder: Path):
    texts = excerpts(str(llama_folder), 40, 2)
    assert texts.keys() == {"code", "prose"}
    oracle, nats, num_bytes = load_oracle(llama_folder), 0.0, 0
    for tokens, size in texts["prose"]:
        assert len(tokens) <= 40
        ids = torch.from_numpy(tokens.astype("int64"))
        nats -= float(laws_of(oracle, tokens.tolist()).gather(1, ids[1:, None]).sum())
        num_bytes += size
    found = bits_per_byte(load_engine(llama_folder), texts["prose"])
    assert found == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-4)


def test_formats_are_compared_with_the_widened_weights():
    found = with_differences(
        {"bf16": {"weights": "b", "code": 2.0}, "int8": {"weights": "i", "code": 2.01}}
    )
    assert found["int8"]["more, %"] == {"code": 0.5}
    assert found["bf16"]["more, %"] == {"code": 0.0}
    assert with_differences({"int8": {"code": 2.0}}) == {"int8": {"code": 2.0}}


def test_a_text_that_differs_and_a_run_without_drafts_are_problems():
    off, on = ({"equal": 4, "of": 4, "mean acceptance length": length} for length in (None, 2.0))
    assert problems({"off": off, "on": on}) == []
    assert problems({"off": off, "on": {**on, "equal": 3}}) == ["on: 1 of 4 texts differ"]
    assert problems({"on": off}) == ["no draft was verified, so nothing was tested"]
