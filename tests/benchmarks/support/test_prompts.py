"""Prompts are made of held-out text, equal in every run and all different."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.support.prompts import KINDS, prompts
from benchmarks.support.record import ROOT


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ROOT / "models" / "demo-target")


def test_the_same_call_makes_the_same_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    assert prompts(25, tokenizer) == prompts(25, tokenizer)


def test_the_kinds_take_turns_and_no_prompt_comes_twice(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    made = prompts(150, tokenizer)
    assert [prompt.kind for prompt in made[:5]] == list(KINDS)
    assert len({prompt.token_ids for prompt in made}) == 150
    assert all(8 <= len(prompt.token_ids) <= 320 for prompt in made)


def test_each_kind_is_what_its_name_says(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = {prompt.kind: tokenizer.decode(prompt.token_ids) for prompt in prompts(5, tokenizer)}
    held_out = [
        json.loads(line)["text"]
        for line in (ROOT / "models" / "heldout.jsonl").read_text("utf-8").splitlines()
    ]
    assert any(texts["code"][:40] in text for text in held_out)
    assert texts["json"].rstrip().endswith(",")
    assert "# The same again" in texts["edit"]
    assert texts["chat"].count("user") >= 2
