"""Converts the tokens of one sequence to text as they arrive, and ends it at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.core import TokenArray
from cluster.errors import RequestError
from cluster.records import equal_record
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.base import held_len


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

    Only text that may begin a stop string is held back.  The string that ends first wins; of
    several that end at one character, the longest.  So the text returned so far depends only on
    the tokens, not on how they were grouped, and a resumed text continues where it stopped.  Takes
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
        self._detokenizer = tokenizer.detokenizer(
            prompt_ids, skip_special_tokens=skip_special_tokens
        )
        if not all(stop_strings):  # it would end every text at once
            raise RequestError("stop contains an empty string; leave it out", param="stop")
        self._stops = stop_strings
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
        if not self._stops:
            self.num_tokens += len(ids)
            return TextDelta(self._detokenizer.feed(ids), len(ids))
        pieces = []
        for index, token in enumerate(ids):
            self.num_tokens += 1
            text, stop = self._search(self._detokenizer.feed((token,)))
            pieces.append(text)
            if stop is not None:
                return TextDelta("".join(pieces), index + 1, stop)
        return TextDelta("".join(pieces), len(ids))

    def finish(self) -> TextDelta:
        """End the sequence; returns the held-back text, incomplete characters as U+FFFD."""
        if self.is_finished:
            return TextDelta("")
        text, stop = self._search(self._detokenizer.flush())
        self.is_finished = True
        return TextDelta(text + self._held, 0, stop)

    def _search(self, piece: str) -> tuple[str, str | None]:
        """The text that is final after `piece`, and the stop string that ends it or None."""
        if self.num_tokens <= self._min_tokens:
            return piece, None
        text, self._held = self._held + piece, ""
        ends = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if not ends:
            certain = len(text) - held_len(text, self._stops)
            self._held = text[certain:]
            return text[:certain], None
        self.is_finished = True
        end, _, stop = min(ends)
        return text[: end if self._include_stop else end - len(stop)], stop
