"""What is told of every request: a span of OpenTelemetry and a line of the log, none of its text.

OpenTelemetry is an extra, `otel`: it is imported where `ingress.traces_url` asks for it, and else
costs nothing.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from cluster.core import FinishReason
from cluster.errors import ConfigError
from cluster.logs import UNKNOWN
from deployments.ingress.api.writer import times
from deployments.ingress.generation import Generation

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


# vLLM's names of what its own spans hold.
_TIMES = {
    "queue_time_ms": "gen_ai.latency.time_in_queue",
    "time_to_first_token_ms": "gen_ai.latency.time_in_model_prefill",
    "generation_time_ms": "gen_ai.latency.time_in_model_decode",
    "e2e_time_ms": "gen_ai.latency.e2e",
}


def provider_of(url: str) -> TracerProvider | None:
    """What makes spans and sends them to a collector, by OTLP over HTTP; None without a URL.

    Raises ConfigError without the extra."""
    if not url:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        reason = f"{error.name} is not installed: pip install 'drafthouse[otel]'"
        raise ConfigError.at("ingress.traces_url", reason) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "drafthouse"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


def follow(
    provider: TracerProvider, generation: Generation, traceparent: str, model_name: str
) -> None:
    """Make the span of a request, below the client's own if it names one."""
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    span = provider.get_tracer("drafthouse").start_span(
        "llm_request",
        parent,
        SpanKind.SERVER,
        {
            "gen_ai.request.id": generation.id,
            "gen_ai.response.model": model_name,
            "drafthouse.task": generation.spec.task,
        },
    )

    def step(num_tokens: int) -> None:
        span.add_event("step", {"num_tokens": num_tokens})

    generation.when_grown.append(step)
    generation.when_closed.append(partial(_end, span))


def _end(span: Span, generation: Generation) -> None:
    """End it with its request."""
    stats = generation.stats
    attributes: dict[str, Any] = {
        "gen_ai.usage.prompt_tokens": generation.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": generation.num_output_tokens,
        "drafthouse.num_draft_tokens": stats.num_draft_tokens,
        "drafthouse.num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
    }
    for name, value in times(generation).items():
        if name in _TIMES and value is not None:
            attributes[_TIMES[name]] = value / 1000.0
    span.set_attributes(attributes)
    span.end()


# One line in the log for every request: who, how much, how long; never what it said.


log = logging.getLogger(__name__)


def write_line(generation: Generation) -> None:
    """Say in the log that a request has ended; nothing of one that was refused before its
    samples were made."""
    choices, tokens, stats = generation.choices, generation.tokens, generation.stats
    if not choices:
        return
    unfinished = generation.error_code or FinishReason.CANCELLED
    reasons = {choice.finish_reason or unfinished for choice in choices}
    arrived_at, first_token_at = generation.arrived_at, generation.first_token_at
    ttft_ms: int | str = UNKNOWN
    if first_token_at is not None:
        ttft_ms = round(1000.0 * (first_token_at - arrived_at))
    log.info(
        "request id=%(id)s task=%(task)s prompt_tokens=%(prompt_tokens)d "
        "output_tokens=%(output_tokens)d queue_ms=%(queue_ms)d ttft_ms=%(ttft_ms)s "
        "total_ms=%(total_ms)d finish=%(finish)s "
        "accepted_drafts=%(accepted_drafts)d/%(draft_tokens)d",
        {
            "id": generation.id,
            "task": generation.spec.task,
            "prompt_tokens": tokens["prompt"],
            "output_tokens": tokens["output"],
            "queue_ms": round(1000.0 * max(choice.queue_time_s for choice in choices)),
            "ttft_ms": ttft_ms,
            "total_ms": round(1000.0 * (time.monotonic() - arrived_at)),
            "finish": ",".join(sorted(reasons)),
            "accepted_drafts": stats.num_accepted_draft_tokens,
            "draft_tokens": stats.num_draft_tokens,
        },
    )
