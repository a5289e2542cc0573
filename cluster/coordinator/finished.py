"""What the metrics are told of a text that has ended: its times."""

from __future__ import annotations

from cluster.coordinator.session import Session
from cluster.metrics import vllm_metrics
from cluster.metrics.recorder import Recorder


def record_finished(recorder: Recorder, session: Session, now: float) -> None:
    """Enter its times, if it had a first token."""
    if session.first_at is None or session.is_scored:
        return
    prefill_s, decode_s = session.prefill_time_s, session.decode_time_s
    num_more = session.num_output_tokens - 1
    for metric, value in (
        (vllm_metrics.E2E_TIME, now - session.arrived_at),
        (vllm_metrics.QUEUE_TIME, session.queue_time_s or 0.0),
        (vllm_metrics.PREFILL_TIME, prefill_s),
        (vllm_metrics.DECODE_TIME, decode_s),
        (vllm_metrics.INFERENCE_TIME, prefill_s + decode_s),
        (vllm_metrics.TIME_PER_OUTPUT_TOKEN, decode_s / num_more if num_more > 0 else 0.0),
    ):
        recorder.observe(metric, value)
