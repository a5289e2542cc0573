"""The log-probabilities of prompts: each prompt is scored as an output that is given.

A score is a request of its own: the prompt's first token is its context, the rest its output
(`SamplingParams.forced_ids`).  It goes before the prompt's samples, which then find the prompt in
the prefix cache: a prompt is computed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.core import Request, SamplingParams, SpeculationOptions, TokenLogprob
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.ticket import Ticket

PromptLogprobs = Sequence[TokenLogprob | None]


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
