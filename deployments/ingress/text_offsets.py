"""Where the tokens of a completion stand in its text (OpenAI's `text_offset`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.core import TokenArray
from cluster.text.tokenizer import Tokenizer

# Decoders depend on at most the last word of the prompt.
_NUM_CONTEXT_TOKENS = 8


class TextOffsets:
    """Of one choice, in characters of its text, which an echoed prompt begins.

    A token with only a part of a character stands where the character does; one without text, as
    a special token that is left out, where the next text does.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: TokenArray, *, skip_special_tokens: bool
    ) -> None:
        context = prompt_ids[-_NUM_CONTEXT_TOKENS:].tolist()
        self._tokenizer = tokenizer
        self._output = tokenizer.detokenizer(context, skip_special_tokens=skip_special_tokens)
        self._text_len = 0

    def of_prompt(self, token_ids: Iterable[int], echo: str) -> list[int]:
        """Of an echoed prompt's tokens; `of_output` goes on behind the echo."""
        special_ids = self._tokenizer.special_ids
        shown = self._tokenizer.detokenizer(skip_special_tokens=True)
        offsets: list[int] = []
        place = 0
        for token in token_ids:
            offsets.append(min(place, len(echo)))
            if token not in special_ids:
                place += len(shown.feed((token,)))
                continue
            # A special token of the tokenizer's own making is not in the text that was sent.
            text = self._tokenizer.token_text(token)
            place += len(text) if echo.startswith(text, place) else 0
        self._text_len = len(echo)
        return offsets

    def of_output(self, token_ids: Sequence[int]) -> list[int]:
        """Of the next tokens of the output."""
        offsets: list[int] = []
        for token in token_ids:
            offsets.append(self._text_len)
            self._text_len += len(self._output.feed((token,)))
        return offsets
