"""Where a text ends."""

from __future__ import annotations

import pytest

from cluster.coordinator.session import Session
from cluster.core import SamplingParams, token_array
from tests.support.coordinator.house import request


def session(max_tokens: int = 9) -> Session:
    asked = request([5, 6], SamplingParams(max_tokens=max_tokens), output_ids=token_array([7]))
    return Session("r", asked, lambda event: None, 0, 0.0)


@pytest.mark.parametrize(
    ("max_tokens", "max_context_len", "remaining"),
    [(9, 0, 8), (9, 11, 8), (9, 12, 8), (9, 10, 7), (9, 3, 0), (9, 2, -1), (1, 100, 0)],
)
def test_a_text_ends_by_max_tokens_or_by_the_context_limit(
    max_tokens: int, max_context_len: int, remaining: int
) -> None:
    text = session(max_tokens)
    text.limit(max_context_len)
    assert text.remaining == remaining


def test_where_a_text_ends_is_fixed_once_it_has_a_place() -> None:
    text = session()
    for generation, max_context_len in ((0, 0), (0, 8), (1, 5), (2, 100)):
        text.generation = generation
        text.limit(max_context_len)
    assert text.opened().max_len == 8
