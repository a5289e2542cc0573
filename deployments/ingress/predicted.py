"""A request's prediction: what it expects the output to be, and what came of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from cluster.core import SpeculationStats
from cluster.errors import RequestError
from cluster.spec.params import MAX_PREDICTION_TOKENS
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.spec import GenerationSpec, Limits

# As for prompts: so much text takes about two milliseconds.
_INLINE_CHARACTERS = 8192


def with_prediction(spec: GenerationSpec, text: str, limits: Limits) -> GenerationSpec:
    """`spec` with the output that its client expects."""
    if not text:
        return spec
    names = limits.predictors_of(spec.task, spec.speculation)
    return dataclasses.replace(spec, prediction=text, prediction_drafters=names)


async def prediction_ids(
    spec: GenerationSpec, tokenizer: Tokenizer, max_chars_per_token: float
) -> tuple[int, ...]:
    """Its tokens, as the output would have them; raises RequestError for too many of them.

    () where no drafter would read them.
    """
    text = spec.prediction
    if not text or not spec.prediction_drafters:
        return ()
    limit = int(MAX_PREDICTION_TOKENS * max_chars_per_token)
    if len(text) > limit:
        raise RequestError.at(
            "prediction",
            f"{len(text)} characters; at most {limit} are read; send the part that the "
            "output begins with",
        )

    def encode() -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).tolist())

    found = encode() if len(text) <= _INLINE_CHARACTERS else await asyncio.to_thread(encode)
    if len(found) > MAX_PREDICTION_TOKENS:
        raise RequestError.at(
            "prediction",
            f"{len(found)} tokens; at most {MAX_PREDICTION_TOKENS} are read; send the "
            "part that the output begins with",
        )
    return found


def prediction_counts(spec: GenerationSpec, stats: SpeculationStats) -> Mapping[str, int]:
    """Tokens of the prediction that were drafted and became output, and those that did not.

    Whoever else had proposed them.
    """
    names = spec.prediction_drafters
    counts = stats.accepted_by_drafter, stats.shared_by_drafter
    accepted = sum(count.get(name, 0) for count in counts for name in names)
    verified = sum(stats.verified_by_drafter.get(name, 0) for name in names)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": verified - accepted,
    }


def prediction_idle(spec: GenerationSpec) -> dict[str, Any]:
    """Why nobody drafts from its prediction; empty where somebody does, or it has none."""
    if not spec.prediction or spec.prediction_drafters:
        return {}
    is_enabled = spec.speculation.enabled and spec.speculation.max_draft_tokens != 0
    why = "no_prediction_drafter" if is_enabled else "disabled"
    return {"prediction_idle_because": why}
