"""Where a text is cut, and the breaker: small parts on their own."""

from __future__ import annotations

import pytest

from cluster.breaker import CircuitBreaker
from cluster.coordinator.session import Limits, Session
from cluster.core import FinishReason, SamplingParams, token_array
from tests.support.coordinator.house import request


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3], (3, None)),
        ([1, 9, 3], (1, FinishReason.STOP)),
        ([9], (0, FinishReason.STOP)),
        ([1, 2, 3, 4], (4, FinishReason.LENGTH)),
        ([1, 2, 3, 4, 5], (4, FinishReason.LENGTH)),
        ([1, 2, 3, 9], (3, FinishReason.STOP)),
        ([1, 2, 3, 4, 9], (4, FinishReason.LENGTH)),
    ],
)
def test_the_text_is_cut_at_stops_and_limits(
    tokens: list[int], expected: tuple[int, FinishReason | None]
) -> None:
    params = SamplingParams(max_tokens=4, stop_token_ids=(9,))
    session = Session("r", request([5, 6], params), lambda event: None, 0, 0.0)
    assert session.cut(token_array(tokens), Limits()) == expected


def test_the_context_limit_counts_prompt_and_output() -> None:
    session = Session(
        "r", request([5, 6], SamplingParams(max_tokens=9)), lambda event: None, 0, 0.0
    )
    assert session.cut(token_array([1, 2, 3, 4]), Limits(max_context_len=5)) == (
        3,
        FinishReason.LENGTH,
    )


def test_the_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(3, 10.0)
    for now in range(5):
        assert not breaker.record_failure(float(now)) or now > 1
        if now == 1:
            breaker.record_success()
    assert not breaker.allows(4.0)
    assert breaker.state(4.0) == "open"


def test_on_probation_one_failure_opens_and_one_success_closes() -> None:
    breaker = CircuitBreaker(2, 10.0)
    breaker.record_failure(0.0)
    breaker.record_failure(0.0)
    assert breaker.state(10.0) == "probation"
    assert breaker.record_failure(10.0)
    assert breaker.state(19.0) == "open"
    breaker.record_success()
    assert breaker.state(20.0) == "closed"
    assert not breaker.record_failure(21.0)


def test_a_breaker_is_history_long_after_its_last_failure() -> None:
    breaker = CircuitBreaker(2, 10.0)
    assert breaker.is_history(0.0)
    breaker.record_failure(5.0)
    assert not breaker.is_history(30.0)
    assert breaker.is_history(105.0)
