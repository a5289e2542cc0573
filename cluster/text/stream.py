"""The text of one sequence as its tokens arrive: detokenised, and ended at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core import TokenArray
from cluster.text.stop import StopMatcher
from cluster.text.tokenizer import Tokenizer

# Decoders look at most at the last word of what a text continues.
_NUM_CONTEXT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TextDelta:
    """News of a text.

    text: what became certain; empty while a character or stop string is incomplete.
    num_tokens: how many of the pushed tokens belong to the output; fewer than pushed when a stop
    string was completed before the last of them.  stop: the stop string that ended the text.
    """

    text: str
    num_tokens: int = 0
    stop: str | None = None


class TextStream:
    """Turns output tokens into text deltas; their concatenation is the text served.

    Text that may be the beginning of a stop string is held back, and no more than that.  What has
    been handed out after some tokens depends on those tokens alone, not on how they were pushed,
    so a resumed text continues where it broke off.  Costs microseconds per token.
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
        """include_stop: the text keeps the stop string.  min_tokens: output tokens whose text is
        not searched.  prompt_ids: what the text continues; keeps the space between both in
        vocabularies that write it into the following word.  Raises RequestError for an empty stop.
        """
        context = [int(token) for token in prompt_ids[-_NUM_CONTEXT_TOKENS:]]
        self._detokenizer = tokenizer.detokenizer(context, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop_strings) if stop_strings else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self._num_tokens = 0
        self._is_finished = False

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, up to and including the one that completed a stop string."""
        return self._num_tokens

    @property
    def is_finished(self) -> bool:
        """True after a stop string or finish."""
        return self._is_finished

    def push(self, token_ids: TokenArray | Sequence[int]) -> TextDelta:
        """Take the next output tokens; after the end of the text they are ignored."""
        if self._is_finished:
            return TextDelta("")
        ids = token_ids if isinstance(token_ids, list) else [int(token) for token in token_ids]
        if self._matcher is None:
            self._num_tokens += len(ids)
            return TextDelta(self._detokenizer.feed(ids), len(ids))
        pieces = []
        for index, token in enumerate(ids):
            self._num_tokens += 1
            text, stop = self._search(self._detokenizer.feed((token,)), self._matcher)
            pieces.append(text)
            if stop is not None:
                return TextDelta("".join(pieces), index + 1, stop)
        return TextDelta("".join(pieces), len(ids))

    def finish(self) -> TextDelta:
        """The sequence has ended: hand out what was held back; incomplete characters as U+FFFD."""
        if self._is_finished:
            return TextDelta("")
        rest = self._detokenizer.flush()
        if self._matcher is None:
            self._is_finished = True
            return TextDelta(rest)
        text, stop = self._search(rest, self._matcher)
        self._is_finished = True
        if stop is None:
            text += self._held
            self._held = ""
        return TextDelta(text, 0, stop)

    def _search(self, piece: str, matcher: StopMatcher) -> tuple[str, str | None]:
        """The text that `piece` makes certain, and the stop string that ends it."""
        if self._num_tokens <= self._min_tokens:
            return piece, None
        match = matcher.feed(piece)
        text = self._held + piece
        if match is None:
            certain = len(text) - matcher.held_len
            self._held = text[certain:]
            return text[:certain], None
        self._is_finished = True
        end = len(self._held) + match.end
        self._held = ""
        return text[: end if self._include_stop else end - len(match.stop)], match.stop
