"""What an answer says of its times: vLLM's names, and two of ours.  One table for the pages and
for /openapi.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from deployments.ingress.generation import Generation

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
    e2e_s = generation.times.clock() - generation.times.arrived_at
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
