"""Finds the first of several stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import RequestError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """stop: the string found.  end: characters of the fed piece up to and including its last."""

    stop: str
    end: int


class StopMatcher:
    """Knuth-Morris-Pratt over all stop strings at once: constant time per character.

    The string that is complete first wins, and of those that end at the same character the
    longest; so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Raises RequestError for an empty string, which would stop every text at once."""
        if not all(stop_strings):
            raise RequestError("stop holds an empty string; leave it out", param="stop")
        # Longest first: the first one complete at a character is the longest.
        self._stops = sorted(set(stop_strings), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def held_len(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Take the next piece; the match that it completes, if any."""
        matched = self._matched
        for position, char in enumerate(text):
            for index, stop in enumerate(self._stops):
                count = matched[index]
                fallback = self._fallbacks[index]
                while count and stop[count] != char:
                    count = fallback[count - 1]
                if stop[count] == char:
                    count += 1
                if count == len(stop):
                    return StopMatch(stop, position + 1)
                matched[index] = count
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop` the length of its longest proper border."""
    fallbacks = [0] * len(stop)
    count = 0
    for index in range(1, len(stop)):
        while count and stop[count] != stop[index]:
            count = fallbacks[count - 1]
        if stop[count] == stop[index]:
            count += 1
        fallbacks[index] = count
    return fallbacks
