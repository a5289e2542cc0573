"""What an answer says of its cost: token counts and speculation statistics."""

from __future__ import annotations

from typing import Any

from deployments.ingress.generation import Generation
from deployments.ingress.predicted import prediction_counts, prediction_idle
from deployments.ingress.times import times


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
    """What `times.TIMES` and `api.table_statistics.STATISTICS` say, for the top level of every
    answer."""
    stats = generation.stats
    return {
        **times(generation),
        "speculative_decoding": {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": list(stats.acceptance_histogram) or [0],
            "num_steps": stats.num_steps,
            "num_spec_steps": stats.num_spec_steps,
            "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_spec_tokens": stats.num_spec_tokens,
            "accepted_by_drafter": dict(stats.accepted_by_drafter),
            "shared_by_drafter": dict(stats.shared_by_drafter),
            "decode_time_s": stats.decode_time_s,
            "idle_because": stats.idle_because or None,
            **prediction_idle(generation.spec),
        },
    }
