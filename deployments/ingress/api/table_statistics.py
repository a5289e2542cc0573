"""What every answer says of its drafts: one table for docs/api.md, docs/requests.md and
/openapi.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.coordinator.idle import MEANINGS
from deployments.ingress.api.contract import Rule, Schema, array, supported

STATISTICS_PATH = "metrics.speculative_decoding"

_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number", "minimum": 0}
_BY_DRAFTER: Schema = {"type": "object", "additionalProperties": _COUNT}
# The words that a statistic may be, and what they mean.
WORDS: Mapping[str, Mapping[str, str]] = {
    "idle_because": MEANINGS,
    "prediction_idle_because": {
        "no_prediction_drafter": "none is configured for the task, or allowed by the request",
        "disabled": "the request has no drafts",
    },
}


def _always(name: str, schema: Schema, note: str) -> Rule:
    return supported(name, schema, note, is_required=True)


STATISTICS = (
    _always("num_steps", _COUNT, "target steps that brought tokens, plain ones included"),
    _always("num_spec_steps", _COUNT, "those that checked at least one draft token"),
    _always("num_draft_tokens", _COUNT, "draft tokens checked in them"),
    _always("num_accepted_draft_tokens", _COUNT, "draft tokens accepted"),
    _always(
        "mean_acceptance_length",
        _NUMBER,
        "1 + num_accepted_draft_tokens / num_spec_steps: tokens per step with drafts",
    ),
    _always(
        "draft_acceptance_rate", _NUMBER, "num_accepted_draft_tokens / num_draft_tokens; 0 of none"
    ),
    _always(
        "acceptance_histogram",
        array(_COUNT, min_items=1),
        "entry k counts the steps with drafts that accepted k of them; num_spec_tokens + 1 entries",
    ),
    _always("num_spec_tokens", _COUNT, "the most draft tokens that a step accepted"),
    _always(
        "accepted_by_drafter",
        _BY_DRAFTER,
        "draft tokens accepted, by drafter; they add up to num_accepted_draft_tokens, for a token "
        "that several had proposed counts for the one whose drafts have been worth most: the first "
        "in draft_sources",
    ),
    _always(
        "shared_by_drafter",
        _BY_DRAFTER,
        "draft tokens accepted that the drafter had proposed too, and that count for another one",
    ),
    _always(
        "decode_time_s",
        _NUMBER,
        "seconds from the tokens of the first step to those of the last, of several choices the "
        "longest; tokens after the first / this = tokens per second",
    ),
    _always(
        "idle_because",
        {"enum": [*WORDS["idle_because"], None]},
        "why no step checked a draft token; null where one did",
    ),
    supported(
        "prediction_idle_because",
        {"enum": list(WORDS["prediction_idle_because"])},
        "why nobody drafted from the request's `prediction`; absent where somebody did, or there "
        "is none",
    ),
)


def statistics_schema() -> dict[str, Any]:
    """JSON Schema of `STATISTICS_PATH`."""
    return {
        "type": "object",
        "required": [rule.name for rule in STATISTICS if rule.is_required],
        "properties": {
            rule.name: {**(rule.schema or {}), "description": _described(rule)}
            for rule in STATISTICS
        },
    }


def _described(rule: Rule) -> str:
    words = WORDS.get(rule.name, {})
    return ". ".join([rule.note, *(f"{word}: {meaning}" for word, meaning in words.items())])
