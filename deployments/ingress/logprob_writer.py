"""Writes log-probabilities in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.core import TokenLogprob
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.prompt_scores import PromptLogprobs
from deployments.ingress.text_offsets import TextOffsets


class LogprobWriter:
    """Formats the log-probabilities of one choice."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        offsets: TextOffsets | None = None,
        *,
        names_token_ids: bool = False,
    ) -> None:
        """offsets: of a completion; None = it is a chat, whose format has none.

        names_token_ids: tokens are named `token_id:N`, which no two of them share."""
        self._tokenizer = tokenizer
        self._names_token_ids = names_token_ids
        self._offsets = offsets

    def write_prompt(
        self, token_ids: Sequence[int], logprobs: PromptLogprobs, echo: str
    ) -> dict[str, Any]:
        """Of an echoed prompt: nothing is said of its first token, which nothing comes before."""
        assert self._offsets is not None, "no chat has an echo"
        known = [one or TokenLogprob(0.0) for one in logprobs]
        pairs = list(zip(token_ids, known, strict=True))
        written = self._completion(pairs, self._offsets.of_prompt(token_ids, echo))
        for index, one in enumerate(logprobs):
            if one is None:
                written["token_logprobs"][index] = written["top_logprobs"][index] = None
        return written

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of the next tokens of the output."""
        pairs = list(zip(token_ids, logprobs, strict=True))
        if self._offsets is None:
            return {"content": [self._chat_entry(*pair) for pair in pairs], "refusal": None}
        return self._completion(pairs, self._offsets.of_output(token_ids))

    def _completion(
        self, pairs: Sequence[tuple[int, TokenLogprob]], offsets: list[int]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._name(token) for token, _ in pairs],
            "token_logprobs": [one.logprob for _, one in pairs],
            # As in vLLM, the token that was drawn is always there, though it may not be among the
            # most likely ones; where two tokens have the same text its value is the one shown.
            "top_logprobs": [
                {self._name(other): value for other, value in one.top}
                | {self._name(token): one.logprob}
                for token, one in pairs
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """The token's text; incomplete characters as OpenAI writes them."""
        if self._names_token_ids:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _chat_entry(self, token: int, one: TokenLogprob) -> dict[str, Any]:
        top = [self._alternative(other, value) for other, value in one.top]
        return {**self._alternative(token, one.logprob), "top_logprobs": top}

    def _alternative(self, token: int, value: float) -> dict[str, Any]:
        return {
            "token": f"token_id:{token}"
            if self._names_token_ids
            else self._tokenizer.token_text(token),
            "logprob": value,
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


def joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Two lists of log-probabilities as one; `first` may be empty."""
    return {name: first[name] + values for name, values in then.items()} if first else then
