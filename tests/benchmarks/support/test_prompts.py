"""Prompts are made of held-out text, equal in every run and all different."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.support.prompts import KINDS, prompts
from benchmarks.support.record import ROOT


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ROOT / "models" / "demo-target")


def test_the_kinds_take_turns_and_no_prompt_comes_twice(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    made = prompts(150, tokenizer)
    assert made == prompts(150, tokenizer)
    assert [prompt.kind for prompt in made[:5]] == list(KINDS)
    assert len({prompt.token_ids for prompt in made}) == 150
    assert all(8 <= len(prompt.token_ids) <= 320 for prompt in made)
