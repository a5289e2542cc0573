"""The matcher finds the same stop strings as a search through the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import RequestError
from cluster.text.stream import StopMatcher

letters = st.text(alphabet="ab", max_size=24)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3)


def naive(text: str, stop_strings: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop string that ends first; the longest if several end there."""
    ends = [
        (text.index(stop) + len(stop), -len(stop), stop) for stop in stop_strings if stop in text
    ]
    if not ends:
        return None
    end, _, stop = min(ends)
    return end, stop


@given(text=letters, stop_strings=stops, data=st.data())
def test_matches_equal_a_naive_search_for_any_division_of_the_text(
    text: str, stop_strings: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    matcher = StopMatcher(stop_strings)
    start, found = 0, None
    for end in [*cuts, len(text)]:
        match = matcher.feed(text[start:end])
        if match is not None:
            found = (start + match.end, match.stop)
            break
        start = end
    assert found == naive(text, stop_strings)


@given(text=letters, stop_strings=stops)
def test_exactly_the_longest_possible_beginning_is_held_back(
    text: str, stop_strings: list[str]
) -> None:
    matcher = StopMatcher(stop_strings)
    if matcher.feed(text) is not None:
        return
    beginnings = [
        length
        for stop in stop_strings
        for length in range(len(stop))
        if text.endswith(stop[:length])
    ]
    assert matcher.held_len == max(beginnings)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopMatcher(["a", ""])
