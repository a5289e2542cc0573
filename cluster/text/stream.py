"""Converts the tokens of one sequence to text as they arrive, and ends it at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.core import TokenArray
from cluster.errors import RequestError
from cluster.records import equal_record, frozen
from cluster.text.tokenizer import Tokenizer

# Finds the first of several stop strings in a text that arrives in pieces.


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


# Decoders depend on at most the last word of the prompt.
_NUM_CONTEXT_TOKENS = 8


@equal_record
class TextDelta:
    """New text of a sequence.

    text: the newly final text; empty while a character or stop string is incomplete.
    num_tokens: how many of the pushed tokens belong to the output; fewer than pushed if a stop
    string ended before the last one.  stop: the stop string that ended the text.
    """

    text: str
    num_tokens: int = 0
    stop: str | None = None


class TextStream:
    """Turns output tokens into text deltas; their concatenation is the answer's text.

    Only text that may begin a stop string is held back.  The text returned so far depends only on
    the tokens, not on how they were grouped, so a resumed text continues where it stopped.  Takes
    microseconds per token.

    num_tokens: of the output, up to and including the one that completed a stop string.
    is_finished: after a stop string or `finish`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_ids: TokenArray | Sequence[int] = (),
    ) -> None:
        """include_stop: keep the stop string in the text.  min_tokens: output tokens whose
        text is not searched.  prompt_ids: the prompt; needed to keep the space before the first
        word in vocabularies that join spaces to words.  Raises RequestError for an empty stop.
        """
        context = [int(token) for token in prompt_ids[-_NUM_CONTEXT_TOKENS:]]
        self._detokenizer = tokenizer.detokenizer(context, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop_strings) if stop_strings else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.num_tokens = 0
        self.is_finished = False

    def push(self, token_ids: TokenArray | Sequence[int]) -> TextDelta:
        """Add the next output tokens; ignored after the end of the text."""
        if self.is_finished:
            return TextDelta("")
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        if self._matcher is None:
            self.num_tokens += len(ids)
            return TextDelta(self._detokenizer.feed(ids), len(ids))
        pieces = []
        for index, token in enumerate(ids):
            self.num_tokens += 1
            text, stop = self._search(self._detokenizer.feed((token,)), self._matcher)
            pieces.append(text)
            if stop is not None:
                return TextDelta("".join(pieces), index + 1, stop)
        return TextDelta("".join(pieces), len(ids))

    def finish(self) -> TextDelta:
        """End the sequence; returns the held-back text, incomplete characters as U+FFFD."""
        if self.is_finished:
            return TextDelta("")
        rest = self._detokenizer.flush()
        if self._matcher is None:
            self.is_finished = True
            return TextDelta(rest)
        text, stop = self._search(rest, self._matcher)
        self.is_finished = True
        if stop is None:
            text += self._held
            self._held = ""
        return TextDelta(text, 0, stop)

    def _search(self, piece: str, matcher: StopMatcher) -> tuple[str, str | None]:
        """The text that is final after `piece`, and the stop string that ends it or None."""
        if self.num_tokens <= self._min_tokens:
            return piece, None
        match = matcher.feed(piece)
        text = self._held + piece
        if match is None:
            certain = len(text) - matcher.held_len
            self._held = text[certain:]
            return text[:certain], None
        self.is_finished = True
        end = len(self._held) + match.end
        self._held = ""
        return text[: end if self._include_stop else end - len(match.stop)], match.stop
