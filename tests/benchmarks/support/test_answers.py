"""Prompts are equal in every run, and rates are computed from the time stamps of tokens."""

import pytest
from transformers import AutoTokenizer

from benchmarks.support.answers import Answer, Law, rate_at_level
from benchmarks.support.prompts import KINDS, prompts
from benchmarks.support.record import ROOT


def answer(*events: tuple[float, int], submitted: float = 0.0) -> Answer:
    return Answer(submitted, events, tuple(range(events[-1][1])))


def test_the_rate_at_a_level_leaves_out_the_end_with_fewer_at_a_time():
    """Two places: three answers of 8 tokens, the last of them alone for its second half."""
    fast = answer((1.0, 1), (2.0, 9), submitted=0.0)
    slow = answer((1.0, 1), (3.0, 9), submitted=0.0)
    last = answer((2.0, 1), (4.0, 9), submitted=2.0)
    # [0, 1]: one token each; [1, 2]: 8 and 4; [2, 3]: 4 and 4; [3, 4] is the last one's alone.
    assert rate_at_level([fast, slow, last], 2) == pytest.approx((2 + 12 + 8) / 3)
    assert rate_at_level([fast, slow, last], 1) == pytest.approx((2 + 12 + 8 + 4) / 4)
    assert rate_at_level([fast, slow, last], 3) == 0.0  # so many never ran at once


def test_laws_are_named_by_their_temperature():
    assert Law.parse("greedy").temperature == 0.0
    assert Law.parse("t0.8").temperature == 0.8
    with pytest.raises(ValueError, match="warm"):
        Law.parse("warm")


def test_the_kinds_of_prompts_take_turns_and_none_comes_twice():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "demo-target")
    made = prompts(150, tokenizer)
    assert made == prompts(150, tokenizer)
    assert [prompt.kind for prompt in made[:5]] == list(KINDS)
    assert len({prompt.token_ids for prompt in made}) == 150
    assert all(8 <= len(prompt.token_ids) <= 320 for prompt in made)
