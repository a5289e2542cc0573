"""Finds the first of several stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import RequestError
from cluster.records import frozen


@frozen
class StopMatch:
    """stop: the string found.  end: its end in the piece that was fed, in characters."""

    stop: str
    end: int


class StopMatcher:
    """Knuth-Morris-Pratt search for all stop strings at once, in constant time per character.

    The string that ends first wins; if several end at the same character, the longest.  So the
    result does not depend on how the text is divided into pieces.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Raises RequestError for an empty string, which would end every text at once."""
        if not all(stop_strings):
            raise RequestError("stop contains an empty string; leave it out", param="stop")
        # Sorted by length, so that the first match at a character is the longest.
        self._stops = sorted(set(stop_strings), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def held_len(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Search the next piece; returns the match that it completes, or None."""
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
    """The length of the longest proper border of each prefix of `stop`."""
    fallbacks = [0] * len(stop)
    count = 0
    for index in range(1, len(stop)):
        while count and stop[count] != stop[index]:
            count = fallbacks[count - 1]
        if stop[count] == stop[index]:
            count += 1
        fallbacks[index] = count
    return fallbacks
