"""The seam between a target and its engine: all that verification asks of one.

`Engine` serves it.  What is beyond it (loading, graphs, adapters' weights, first layers for
drafters) belongs to whoever builds the target.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from cluster.engine.adapters import Adapters
from cluster.engine.limits import EngineLimits
from cluster.engine.schedule.scheduler import PromptPace
from cluster.engine.work import Drawn, Output, Steps, StepSummary, Work

# Ends a step that ran ahead; returns the works that it answered.
Finish = Callable[[Collection[str]], list[Output]]


class TargetEngine(Steps, Protocol):
    """Answers works, one of a request at a time, in steps of many; one thread calls it.

    A work's tokens are cached once it is answered; so are its tree's nodes until `retain` keeps
    some of them.  What a step cannot take waits for the next one, and what the cache has lost is
    answered with `Output.have_len`."""

    @property
    def device(self) -> torch.device:
        """Where `Output.logits` are."""

    @property
    def max_context_len(self) -> int: ...
    @property
    def limits(self) -> EngineLimits:
        """What it can serve at all."""

    @property
    def adapters(self) -> Adapters:
        """Those that a work may name by its index."""

    @property
    def pace(self) -> PromptPace:
        """How many rows of prompts a step may have."""

    @property
    def pages_in_use(self) -> int: ...
    @property
    def pages_total(self) -> int: ...

    @property
    def has_pending(self) -> bool:
        """True if `step` has something to do."""

    @property
    def last_step(self) -> StepSummary:
        """What the last step did; waits until a GPU is done with its forward."""

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        """Run one forward; returns the works that it answered, whose logits a GPU may still be at.

        taps: layers whose hidden rows `last_step` is to have, "behind layer t" by number."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `run_ahead` may begin anything."""

    def run_ahead(self, works: Sequence[Work], drawn: Drawn, taps: Sequence[int]) -> Finish | None:
        """Begin the step behind the last one, whose works bring a token each that is not known yet.

        What is returned ends it, once it is known: to be called, before anything else is asked of
        the engine, with the requests that are to be left as they were; the `delta` of the other
        works holds its token by then.  None: this step cannot run ahead, and nothing was done."""

    def cached_len(self, request_id: str) -> int:
        """Committed tokens of a request that are cached; 0 where it is unknown."""

    def drop_unused_adapters(self) -> None:
        """Free those that are withdrawn and that no request uses any more."""
