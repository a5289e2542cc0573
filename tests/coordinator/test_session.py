"""Where a text ends and what its target is told: small parts on their own."""

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


def test_where_a_text_ends_is_fixed_by_the_first_limit_that_is_known() -> None:
    """Else it would be another text after a failover."""
    text = session()
    for max_context_len in (0, 8, 5, 100):
        text.limit(max_context_len)
    assert text.opened().max_len == 8


def test_a_target_is_told_all_of_the_text() -> None:
    text = session()
    text.text.names, text.text.max_draft_tokens = ("a", "b"), 4
    text.tokens.append(token_array([8, 9]))
    opened = text.opened()
    assert opened.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert opened.prefix_hash == text.tokens.hash_at(5)
    assert (opened.prompt_len, opened.max_len, opened.drafters) == (2, 11, ("a", "b"))
    text.tokens.append(token_array([1]))
    assert opened.token_ids.tolist() == [5, 6, 7, 8, 9]
