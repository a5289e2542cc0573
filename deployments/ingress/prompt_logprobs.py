"""Log-probabilities of prompts in requests and answers: vLLM's field and its shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cluster.core import TokenLogprob
from cluster.errors import RequestError
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.api.table import MAX_TOKENS
from deployments.ingress.fields import Fields
from deployments.ingress.prompt_scores import PromptLogprobs
from deployments.ingress.spec import Limits

_NOTHING = "asks for nothing; send prompt_logprobs with it, or at least 1"


def read_prompt_logprobs(fields: Fields, limits: Limits) -> int | None:
    """How many alternatives per token of the prompt; None = no log-probabilities of it."""
    asked = fields.integer("prompt_logprobs", None, 0, limits.max_logprobs)
    if asked is not None and fields.boolean("stream", default=False):
        raise RequestError.at("prompt_logprobs", "not for streams, as in vLLM; send stream: false")
    return asked


def read_max_tokens(fields: Fields, name: str, *, is_prompt_wanted: bool) -> int | None:
    """None = not given.  0, which only tells of the prompt, needs is_prompt_wanted."""
    count = fields.integer(name, None, 0, MAX_TOKENS)
    if count == 0 and not is_prompt_wanted:
        raise RequestError.at(name, f"0 {_NOTHING}")
    return count


def most(*counts: int | None) -> int | None:
    """The largest number of alternatives that is asked for; None where none is."""
    return max((count for count in counts if count is not None), default=None)


def trimmed(logprobs: PromptLogprobs, num_top: int) -> list[TokenLogprob | None]:
    """At most num_top alternatives of each."""
    return [one and dataclasses.replace(one, top=one.top[:num_top]) for one in logprobs]


def prompt_entries(
    token_ids: Sequence[int],
    logprobs: PromptLogprobs,
    tokenizer: Tokenizer,
    *,
    names_token_ids: bool = False,
) -> list[dict[str, Any] | None]:
    """vLLM's: None for the first token, then by token id the prompt's own and the alternatives."""

    def entry(token: int, value: float, rank: int) -> dict[str, Any]:
        text = f"token_id:{token}" if names_token_ids else tokenizer.token_text(token)
        return {"logprob": value, "rank": rank, "decoded_token": text}

    found: list[dict[str, Any] | None] = []
    for token, one in zip(token_ids, logprobs, strict=True):
        if one is None:
            found.append(None)
            continue
        own = {str(token): entry(token, one.logprob, one.rank)}
        others = {
            str(other): entry(other, value, rank)
            for rank, (other, value) in enumerate(one.top, 1)
            if other != token
        }
        found.append({**own, **others})
    return found
