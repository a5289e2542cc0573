"""What the metrics are told of a request that has ended."""

from __future__ import annotations

from cluster import metrics
from cluster.coordinator.session import Session
from cluster.core import FinishReason
from cluster.metrics import vllm_metrics
from cluster.metrics.recorder import Recorder


def record_finished(recorder: Recorder, session: Session, reason: FinishReason, now: float) -> None:
    """Count the request, and enter its times and lengths if it had a first token."""
    request = session.request
    recorder.add(
        metrics.REQUESTS, task=request.task, segment=request.segment, finish_reason=reason.value
    )
    first_at, last_at = session.statistics.first_at, session.statistics.last_at
    if first_at is None:
        return
    prefill_s, decode_s = session.prefill_time_s, last_at - first_at
    num_more = session.num_output_tokens - 1
    for metric, value in (
        (vllm_metrics.E2E_TIME, now - session.arrived_at),
        (vllm_metrics.QUEUE_TIME, session.queue_time_s or 0.0),
        (vllm_metrics.PREFILL_TIME, prefill_s),
        (vllm_metrics.DECODE_TIME, decode_s),
        (vllm_metrics.INFERENCE_TIME, prefill_s + decode_s),
        (vllm_metrics.TIME_PER_OUTPUT_TOKEN, decode_s / num_more if num_more > 0 else 0.0),
        (vllm_metrics.REQUEST_PROMPT_TOKENS, session.prompt_len),
        (vllm_metrics.REQUEST_GENERATION_TOKENS, session.num_output_tokens),
    ):
        recorder.observe(metric, value)
