"""Rates and latencies are computed from the time stamps of tokens."""

from __future__ import annotations

import pytest

from benchmarks.support.answers import (
    Acceptance,
    Answer,
    Law,
    Result,
    busy_s,
    figures,
    loops,
    rate_at_level,
)


def answer(*events: tuple[float, int], submitted: float = 0.0) -> Answer:
    return Answer(submitted, events, tuple(range(events[-1][1])))


def test_decoding_starts_at_the_first_tokens() -> None:
    one = answer((2.0, 3), (3.0, 5), (4.0, 9))
    assert one.ttft_s == 2.0
    assert one.decode_s == 2.0
    assert one.decode_tokens == 6


def test_tokens_of_one_event_divide_its_time() -> None:
    assert answer((0.0, 1), (1.0, 3), (2.0, 4)).intervals_s() == [0.5, 0.5, 1.0]


def test_time_between_two_decodes_is_not_decoding() -> None:
    assert busy_s([answer((1.0, 1), (3.0, 2)), answer((5.0, 1), (6.0, 2))]) == 3.0


def test_concurrent_decodes_count_once() -> None:
    spans = [answer((1.0, 1), (4.0, 2)), answer((2.0, 1), (3.0, 2)), answer((3.5, 1), (5.0, 2))]
    assert busy_s(spans) == 4.0


def test_the_rate_is_that_of_decoding_alone() -> None:
    side_by_side = (answer((10.0, 1), (12.0, 5)), answer((10.0, 2), (12.0, 6)))
    cell = figures(Result(side_by_side, Acceptance(2, 8, 6)), 2)
    assert cell["tokens_per_s"] == 4.0
    assert cell["mean_acceptance_length"] == 4.0
    assert cell["ttft_p50_ms"] == pytest.approx(10_000)


def test_the_rate_at_a_level_leaves_out_the_end_with_fewer_at_a_time() -> None:
    """Two places: three answers of 8 tokens, the last of them alone for its second half."""
    fast = answer((1.0, 1), (2.0, 9), submitted=0.0)
    slow = answer((1.0, 1), (3.0, 9), submitted=0.0)
    last = answer((2.0, 1), (4.0, 9), submitted=2.0)
    # [1, 2]: 8 and 4 tokens; [2, 3]: 4 and 4; [3, 4] is the last one's alone.
    assert rate_at_level([fast, slow, last], 2, from_submission=False) == pytest.approx(10.0)
    assert rate_at_level([fast, slow, last], 1, from_submission=False) == pytest.approx(8.0)
    assert rate_at_level([fast, slow, last], 3, from_submission=False) == 0.0
    # [0, 1] brought the first tokens of two.
    assert rate_at_level([fast, slow], 2, from_submission=True) == pytest.approx((2 + 12) / 2)
    assert figures(Result((fast, slow, last)), 2)["tokens_per_s"] == pytest.approx(10.0)
    assert figures(Result((fast, slow, last)), 2)["whole_tokens_per_s"] == pytest.approx(8.0)


def test_nothing_decoded_has_no_rate() -> None:
    cell = figures(Result((answer((1.0, 2)),)), 1)
    assert cell["tokens_per_s"] == 0.0
    assert cell["itl_p50_ms"] is None


def test_a_loop_is_an_eight_gram_that_occurs_three_times() -> None:
    period = list(range(10))
    assert loops(period * 3)
    assert not loops(period * 2)
    assert not loops([1, 2, 3, 4, 5, 6, 7, 9] * 2 + list(range(50, 60)))
    assert loops([5] * 10)
    assert not loops([5] * 9)


def test_laws_are_named_by_their_temperature() -> None:
    assert Law.parse("greedy").temperature == 0.0
    assert Law.parse("t0.8").temperature == 0.8
    with pytest.raises(ValueError, match="warm"):
        Law.parse("warm")
