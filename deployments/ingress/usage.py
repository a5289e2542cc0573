"""What an answer says of its cost: token counts, times and speculation statistics, with the tables
of the latter two for the pages and for /openapi.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from cluster.coordinator.idle import MEANINGS
from deployments.ingress.api.wording import Rule, Schema
from deployments.ingress.generation import Generation
from deployments.ingress.prompts import prediction_counts, prediction_idle

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
    Rule(
        "num_accepted_draft_tokens",
        "draft tokens accepted, as far as the text goes: those "
        "behind a stop string, a stop token or a limit are left out",
        _COUNT,
    ),
    Rule(
        "mean_acceptance_length",
        "1 + num_accepted_draft_tokens / num_spec_steps: tokens per step with drafts",
        _NUMBER,
    ),
    Rule(
        "draft_acceptance_rate", "num_accepted_draft_tokens / num_draft_tokens; 0 of none", _NUMBER
    ),
    Rule(
        "acceptance_histogram",
        "entry k counts the steps with drafts that accepted k of them; num_spec_tokens + 1 entries",
        _HISTOGRAM,
    ),
    Rule("num_spec_tokens", "the most draft tokens that a step accepted", _COUNT),
    Rule(
        "accepted_by_drafter",
        "draft tokens accepted, by drafter; they add up to "
        "num_accepted_draft_tokens, for a token that several had proposed counts for the one "
        "whose drafts have been worth most: the first in draft_sources",
        _BY_DRAFTER,
    ),
    Rule(
        "shared_by_drafter",
        "draft tokens accepted that the drafter had proposed too, and that count for another one",
        _BY_DRAFTER,
    ),
    Rule(
        "decode_time_s",
        "seconds from the tokens of the first step to those of the last, of "
        "several choices the longest; tokens after the first / this = tokens per second",
        _NUMBER,
    ),
    Rule("idle_because", "why no step checked a draft token; null where one did", _WHY),
    Rule(
        "prediction_idle_because",
        "why nobody drafted from the request's `prediction`; absent "
        "where somebody did, or there is none",
        _WHY_NOT_PREDICTED,
        is_required=False,
    ),
)


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


# vLLM's names, and two of ours.
TIMES: Mapping[str, str] = {
    "queue_time_ms": "from its arrival to its place at a target",
    "time_to_first_token_ms": "from that place to its first token, as in vLLM: the prefill",
    "generation_time_ms": "from its first token to its last: the decoding",
    "mean_itl_ms": "that, by the tokens after the first; null where there are none",
    "tokens_per_second": "all its tokens, by the time from that place to the last of them",
    "e2e_time_ms": "from its arrival to the end of the answer",
    "arrival_time": "when it arrived, in seconds since 1970",
}


def times(generation: Generation) -> dict[str, float | None]:
    """Return the values of TIMES; null where one answer has several choices, as in vLLM."""
    if len(generation.choices) != 1:
        return dict.fromkeys(TIMES)
    (choice,) = generation.choices
    prefill_s, decode_s = choice.prefill_time_s, choice.stats.decode_time_s
    num_tokens = generation.num_output_tokens
    e2e_s = time.monotonic() - generation.arrived_at
    return {
        "queue_time_ms": 1000.0 * choice.queue_time_s,
        "time_to_first_token_ms": 1000.0 * prefill_s,
        "generation_time_ms": 1000.0 * decode_s,
        "mean_itl_ms": 1000.0 * decode_s / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / (prefill_s + decode_s) if prefill_s + decode_s else None,
        "e2e_time_ms": 1000.0 * e2e_s,
        "arrival_time": time.time() - e2e_s,
    }


def times_schema() -> dict[str, Any]:
    """JSON Schema of the properties that TIMES names."""
    return {name: {"type": ["number", "null"], "description": text} for name, text in TIMES.items()}


def usage(generation: Generation) -> dict[str, Any]:
    """OpenAI's usage.

    Its prediction tokens are drafts from the request's `prediction` alone; other drafters' counts
    are in the metrics.
    """
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "completion_tokens_details": {
            **prediction_counts(generation.spec, generation.stats),
            "reasoning_tokens": 0,
            "audio_tokens": 0,
        },
    }


def metrics(generation: Generation) -> dict[str, Any]:
    """What TIMES and STATISTICS say, for the top level of every answer."""
    stats = generation.stats
    values = {rule.name: getattr(stats, rule.name) for rule in STATISTICS if rule.is_required}
    values["acceptance_histogram"] = values["acceptance_histogram"] or [0]
    values["idle_because"] = values["idle_because"] or None
    values |= prediction_idle(generation.spec)
    return {**times(generation), "speculative_decoding": values}
