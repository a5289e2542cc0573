"""The steps of a choice that asks for its draft trees: numbered, bounded, and written as JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from cluster.core import TokenArray
from cluster.requests.draft_step import DraftStep
from cluster.text.tokenizer import Tokenizer

# Of one choice.  A step without nodes counts as one.
MAX_NODES = 4096


class StepTrace:
    """The steps of one choice, as they arrive; those behind MAX_NODES nodes are dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_dropped = 0
        self._num_steps = self._num_nodes = 0
        self._clock, self._began_at = clock, clock()

    def take(self, steps: Sequence[DraftStep]) -> tuple[DraftStep, ...]:
        """Number and time these steps; returns those that are kept."""
        at_s, kept = self._clock() - self._began_at, list[DraftStep]()
        for step in steps:
            number, self._num_steps = self._num_steps, self._num_steps + 1
            num_nodes = self._num_nodes + max(step.num_nodes, 1)
            # The first one that does not fit is the end: what is kept has no holes.
            if self.num_dropped or num_nodes > MAX_NODES:
                self.num_dropped += 1
                continue
            self._num_nodes = num_nodes
            kept.append(dataclasses.replace(step, number=number, at_s=at_s))
        return tuple(kept)


def written(step: DraftStep, tokenizer: Tokenizer) -> dict[str, Any]:
    """The step as docs/requests.md describes it."""
    nodes = zip(
        step.parents.tolist(),
        _named(step.token_ids, tokenizer),
        step.survival.tolist(),
        step.sources.tolist(),
        strict=True,
    )
    own = _named(step.own_token_ids, tokenizer)
    return {
        "n": step.number,
        "at_ms": round(1000.0 * step.at_s, 1),
        "drafters": list(step.drafters),
        "nodes": [
            [parent, *token, round(survival, 3), bits] for parent, token, survival, bits in nodes
        ],
        "path": step.path.tolist(),
        "own": own[0] if own else None,
        "ms": {
            "draft": round(1000.0 * step.draft_time_s, 2),
            "step": round(1000.0 * step.step_time_s, 2),
        },
        "batch": step.num_sequences,
        "why": step.why,
    }


def _named(token_ids: TokenArray, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Each token with its text, in which bytes that are no character by themselves are U+FFFD."""
    return [(token, tokenizer.token_text(token)) for token in token_ids.tolist()]
