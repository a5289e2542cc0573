"""Writes log-probabilities in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.core import TokenLogprob
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.prompt_scores import PromptLogprobs


class LogprobWriter:
    """Formats the log-probabilities of one choice; counts characters for completions."""

    def __init__(
        self, tokenizer: Tokenizer, *, is_chat: bool, names_token_ids: bool = False
    ) -> None:
        """names_token_ids: tokens are named `token_id:N`, which no two of them share."""
        self._tokenizer = tokenizer
        self._names_token_ids = names_token_ids
        self._is_chat = is_chat
        self._text_len = 0

    def write_prompt(self, token_ids: Sequence[int], logprobs: PromptLogprobs) -> dict[str, Any]:
        """Of an echoed prompt: nothing is said of its first token, which nothing comes before."""
        known = [one or TokenLogprob(0.0) for one in logprobs]
        written = self.write(token_ids, known)
        for index, one in enumerate(logprobs):
            if one is None:
                written["token_logprobs"][index] = written["top_logprobs"][index] = None
        return written

    def write(self, token_ids: Iterable[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        pairs = list(zip(token_ids, logprobs, strict=True))
        if self._is_chat:
            return {"content": [self._chat_entry(*pair) for pair in pairs], "refusal": None}
        texts = [self._name(token) for token, _ in pairs]
        offsets = []
        for token, _ in pairs:
            offsets.append(self._text_len)
            self._text_len += len(self._text(token))
        return {
            "tokens": texts,
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
        return self._text(token)

    def _text(self, token: int) -> str:
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
