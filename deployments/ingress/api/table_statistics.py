"""What every answer says of its drafts: one table for docs/api.md, docs/requests.md and
/openapi.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.coordinator.idle import MEANINGS
from deployments.ingress.api.contract import Rule
from deployments.ingress.api.wording import Schema

STATISTICS_PATH = "metrics.speculative_decoding"

# The words that a statistic may be, and what they mean.
WORDS: Mapping[str, Mapping[str, str]] = {
    "idle_because": MEANINGS,
    "prediction_idle_because": {
        "no_prediction_drafter": "none is configured for the task, or allowed by the request",
        "disabled": "the request has no drafts",
    },
}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number", "minimum": 0}
_BY_DRAFTER: Schema = {"type": "object", "additionalProperties": _COUNT}
_HISTOGRAM: Schema = {"type": "array", "items": _COUNT, "minItems": 1}
_WHY: Schema = {"enum": [*WORDS["idle_because"], None]}
_WHY_NOT_PREDICTED: Schema = {"enum": [*WORDS["prediction_idle_because"]]}

STATISTICS = (
    Rule("num_steps", "target steps that brought some of the text, plain ones included", _COUNT),
    Rule("num_spec_steps", "those that checked at least one draft token", _COUNT),
    Rule("num_draft_tokens", "draft tokens checked in them", _COUNT),
    Rule("num_accepted_draft_tokens", "draft tokens accepted, as far as the text goes: those "
         "behind a stop string, a stop token or a limit are left out", _COUNT),
    Rule("mean_acceptance_length", "1 + num_accepted_draft_tokens / num_spec_steps: tokens per "
         "step with drafts", _NUMBER),
    Rule("draft_acceptance_rate", "num_accepted_draft_tokens / num_draft_tokens; 0 of none",
         _NUMBER),
    Rule("acceptance_histogram", "entry k counts the steps with drafts that accepted k of them; "
         "num_spec_tokens + 1 entries", _HISTOGRAM),
    Rule("num_spec_tokens", "the most draft tokens that a step accepted", _COUNT),
    Rule("accepted_by_drafter", "draft tokens accepted, by drafter; they add up to "
         "num_accepted_draft_tokens, for a token that several had proposed counts for the one "
         "whose drafts have been worth most: the first in draft_sources", _BY_DRAFTER),
    Rule("shared_by_drafter", "draft tokens accepted that the drafter had proposed too, and that "
         "count for another one", _BY_DRAFTER),
    Rule("decode_time_s", "seconds from the tokens of the first step to those of the last, of "
         "several choices the longest; tokens after the first / this = tokens per second",
         _NUMBER),
    Rule("idle_because", "why no step checked a draft token; null where one did", _WHY),
    Rule("prediction_idle_because", "why nobody drafted from the request's `prediction`; absent "
         "where somebody did, or there is none", _WHY_NOT_PREDICTED, is_required=False),
)  # fmt: skip


def statistics_schema() -> dict[str, Any]:
    """JSON Schema of `STATISTICS_PATH`."""
    return {
        "type": "object",
        "required": [rule.name for rule in STATISTICS if rule.is_required],
        "properties": {
            rule.name: {**rule.schema, "description": _described(rule)} for rule in STATISTICS
        },
    }


def _described(rule: Rule) -> str:
    words = WORDS.get(rule.name, {})
    return ". ".join([rule.note, *(f"{word}: {meaning}" for word, meaning in words.items())])
