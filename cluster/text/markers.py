"""Markers in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable


def held_len(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


def first_of(text: str, markers: Iterable[str]) -> tuple[str, str, str] | None:
    """The text before the first marker in it, the marker, and the text after it; None without."""
    places = [(text.find(marker), -len(marker), marker) for marker in markers]
    found = min((place for place in places if place[0] >= 0), default=None)
    if found is None:
        return None
    at, _, marker = found
    return text[:at], marker, text[at + len(marker) :]
