"""What an answer says of its cost: token counts, times and speculation statistics, with the tables
of the latter two for the pages and for /openapi.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.coordinator.idle import MEANINGS
from deployments.ingress.generation import Generation
from deployments.ingress.prompts import prediction_counts, prediction_idle
from deployments.ingress.wording import Rule, Schema

STATISTICS_PATH = "metrics.speculative_decoding"
_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
TIMES: Mapping[str, str] = _TABLES["times"]
_ABSENT = "prediction_idle_because"  # where it has no reason
# The words that a statistic may be, and what they mean.
WORDS: Mapping[str, Mapping[str, str]] = {"idle_because": MEANINGS, _ABSENT: _TABLES[_ABSENT]}


def _rule(name: str, schema: Schema, note: str) -> Rule:
    if name in WORDS:
        schema = {"enum": [*WORDS[name], *([] if name == _ABSENT else [None])]}
    return Rule(name, note, schema, is_required=name != _ABSENT)


STATISTICS = tuple(_rule(name, *each) for name, each in _TABLES["statistics"].items())


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
