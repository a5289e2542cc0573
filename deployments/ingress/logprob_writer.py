"""Writes log-probabilities in OpenAI's formats, with tokens' places in a completion's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.core import TokenArray, TokenLogprob
from cluster.records import record
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.choice import PromptLogprobs
from deployments.ingress.wording import JsonObject

# Decoders depend on at most the last word of the prompt.
_NUM_CONTEXT_TOKENS = 8


@record
class LogprobWriter:
    """Formats the log-probabilities of one answer.

    names_token_ids: tokens are named `token_id:N`, which no two of them share."""

    tokenizer: Tokenizer
    names_token_ids: bool = False

    def entries(
        self, token_ids: Sequence[int], logprobs: PromptLogprobs
    ) -> list[JsonObject | None]:
        """vLLM's: None for the first token, then by token id the prompt's own and the others."""

        def entry(token: int, value: float, rank: int) -> JsonObject:
            return {"logprob": value, "rank": rank, "decoded_token": self._text(token)}

        return [
            None
            if one is None
            else {
                str(token): entry(token, one.logprob, one.rank),
                **{
                    str(other): entry(other, value, rank)
                    for rank, (other, value) in enumerate(one.top, 1)
                    if other != token
                },
            }
            for token, one in zip(token_ids, logprobs, strict=True)
        ]

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> JsonObject:
        """Of the next tokens of a chat's output."""
        content = [
            {
                **self._alternative(token, one.logprob),
                "top_logprobs": [self._alternative(*other) for other in one.top],
            }
            for token, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, token_ids: Sequence[int], logprobs: PromptLogprobs, offsets: list[int]
    ) -> JsonObject:
        """Of the next tokens of a completion, or of its echo: nothing is said of the first token of
        a prompt, which nothing comes before.  offsets: of each in the text."""
        return {
            "tokens": list(map(self._name, token_ids)),
            "token_logprobs": [one and one.logprob for one in logprobs],
            # As in vLLM, the token that was drawn is always there, though it may not be among the
            # most likely ones; where two tokens have the same text its value is the one shown.
            "top_logprobs": [
                one
                and {self._name(other): value for other, value in one.top}
                | {self._name(token): one.logprob}
                for token, one in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """The token's text; incomplete characters as OpenAI writes them."""
        if self.names_token_ids:
            return f"token_id:{token}"
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self.names_token_ids else self.tokenizer.token_text(token)

    def _alternative(self, token: int, value: float) -> JsonObject:
        return {
            "token": self._text(token),
            "logprob": value,
            "bytes": list(self.tokenizer.token_bytes(token)),
        }


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
