"""Log-probabilities of prompts: vLLM's field and its shape, and how they are found.

Each prompt is scored as an output that is given.  A score is a request of its own: the prompt's
first token is its context, the rest its output (`SamplingParams.forced_ids`).  It goes before the
prompt's samples, which then find the prompt in the prefix cache: a prompt is computed once.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from cluster.core import Request, SamplingParams, SpeculationOptions, TokenLogprob
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.ticket import Ticket

PromptLogprobs = Sequence[TokenLogprob | None]


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


class PromptScore:
    """Of one prompt.  ticket: None = it has one token, of which nothing can be said."""

    def __init__(self, ticket: Ticket | None) -> None:
        self.ticket = ticket
        self.is_complete = False
        self._found: list[TokenLogprob | None] = [None]  # of the first token: nothing is before it

    @classmethod
    async def start(
        cls, sample: Request, num_top: int, coordinators: Coordinators, arrived: asyncio.Event
    ) -> PromptScore:
        """sample: a request for the text that follows the prompt.  num_top: alternatives."""
        prompt_ids = sample.prompt_ids
        given = tuple(prompt_ids[1:].tolist())
        if not given:
            arrived.set()  # there is nothing to wait for
            return cls(None)
        request = Request(
            id=f"{sample.id}-prompt",
            prompt_ids=prompt_ids[:1],
            params=SamplingParams(
                temperature=0.0, max_tokens=len(given), forced_ids=given, logprobs=num_top
            ),
            task=sample.task,
            speculation=SpeculationOptions(enabled=False),
            tenant=sample.tenant,
            adapter=sample.adapter,
        )
        return cls(await coordinators.submit(request, arrived))

    def take(self) -> bool:
        """Read what has come; True once it is complete.  Raises the error that ended it."""
        if self.ticket is not None:
            for event in self.ticket.take():
                self._found += event.logprobs
        self.is_complete = self.ticket is None or self.ticket.finished
        return self.is_complete

    @property
    def logprobs(self) -> PromptLogprobs:
        """One entry for each token of the prompt, None for the first; of a complete score."""
        return self._found
